"""Packs that change ComfyUI's code, layers, settings or weights behind its back: the picture stays native's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.samplers
import pytest
import slow
import torch
from comfy.cldm import cldm
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures.calls import only_adds_residuals
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.changed_layers import LayerWatch
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Unavailable
from memory_fixtures import Controlled, controlled, controlnet, file, files, library
from patched import LIMIT, NAME, PROFILE, Patched, load, natively

from sampling import STEPS, error, sample

__all__ = ["controlled", "controlnet", "file", "files", "library"]  # fixtures: pytest finds them by name

BACKENDS = pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
CODE: dict[str, tuple[Any, str]] = {
    "forward_timestep_embed": (openaimodel, "forward_timestep_embed"),
    "timestep_embedding": (openaimodel, "timestep_embedding"),
    "ResBlock._forward": (openaimodel.ResBlock, "_forward"),
    "UNetModel._forward": (openaimodel.UNetModel, "_forward"),
    "UNetModel.forward": (openaimodel.UNetModel, "forward"),
    "BasicTransformerBlock.forward": (attention.BasicTransformerBlock, "forward"),
    "CrossAttention.forward": (attention.CrossAttention, "forward"),
    "GEGLU.forward": (attention.GEGLU, "forward"),
    "optimized_attention": (attention, "optimized_attention"),
    "GroupNorm.forward": (torch.nn.GroupNorm, "forward"),
    "silu": (torch.nn.functional, "silu"),
}


@contextmanager
def replaced(place: str, by: Callable[[Any], Callable] | None = None) -> Iterator[None]:
    """A function of a pack's own in one of ComfyUI's places."""
    owner, name = CODE[place]
    own = getattr(owner, name)
    setattr(owner, name, by(own) if by else lambda *args, **kwargs: own(*args, **kwargs) * 0.9)
    try:
        yield
    finally:
        setattr(owner, name, own)


@pytest.mark.fault("another pack replaces ComfyUI's functions", see="normal speed: *model patched*")
@pytest.mark.parametrize("place", CODE)
def test_code_that_a_pack_replaces_is_natives_until_it_is_put_back(file: Path, library: Library, place: str) -> None:
    reference, patched = natively(file), Patched(load(file), library)
    assert error(patched.sample(), reference) <= LIMIT
    with replaced(place):
        native = sample(load(file))
        assert error(native, reference) > 1e-3, "it does nothing here"
        assert error(patched.sample(), native) == 0
        assert patched.counts == (0, STEPS)
        (told,) = patched.handle.stats.details.values()
        assert f"the pack tests has replaced {place} for all models" in told
    assert error(patched.sample(), reference) <= LIMIT
    assert patched.counts == (STEPS, 0)


@BACKENDS
def test_code_that_was_replaced_before_the_model_was_seen_is_natives(
    file: Path, library: Library, backend: str
) -> None:
    with replaced("ResBlock._forward"):
        native, patched = sample(load(file)), Patched(load(file), library, backend)
        assert error(patched.sample(), native) == 0
        assert patched.counts == (0, STEPS)


def test_nothing_is_built_while_a_pack_has_its_own_code_there(file: Path, tmp_path: Path) -> None:
    network = NativeNetwork.of_model(load(file), NAME)
    order = BuildOrder(network, network.precision, PROFILE, backends()["onnxruntime"])
    with replaced("CrossAttention.forward"), pytest.raises(Unavailable, match="has replaced CrossAttention.forward"):
        build_engine(order, Library([tmp_path]), lambda _phase, _fraction: None, run=run_here)
    assert not Library([tmp_path]).engines()


def test_a_wrapper_of_torchs_own_does_not_cost_the_engine(file: Path, library: Library) -> None:
    reference, patched = natively(file), Patched(load(file), library)
    with replaced("ResBlock._forward", torch.no_grad()):
        assert error(patched.sample(), reference) <= LIMIT
        assert patched.counts == (STEPS, 0)


def resizing(h: torch.Tensor, control: dict | None, name: str) -> torch.Tensor:
    parts = None if control is None else control.get(name)
    if not parts or (part := parts.pop()) is None:
        return h
    if part.shape != h.shape:
        part = torch.nn.functional.interpolate(part, size=h.shape[-2:])
    return h + part


def test_a_function_that_only_resizes_residuals_that_do_not_fit_is_no_reason_to_do_without_engines() -> None:
    assert only_adds_residuals(openaimodel.apply_control)
    assert only_adds_residuals(resizing)
    assert not only_adds_residuals(lambda h, control, name: resizing(h, control, name) * 0.9)
    assert not only_adds_residuals(lambda h, control, name: h)
    assert not only_adds_residuals(lambda h, control: h)


def norm_of(model: ModelPatcher) -> torch.nn.GroupNorm:
    return model.model.diffusion_model.middle_block[0].in_layers[0]


def attention_of(model: ModelPatcher) -> torch.nn.Module:
    return next(one for one in model.model.diffusion_model.modules() if isinstance(one, attention.CrossAttention))


SETTINGS = {"GroupNorm.eps": (norm_of, "eps", 0.5), "heads": (attention_of, "heads", 1)}


@slow.when("torch", but=["heads"])
@slow.when("onnxruntime", but=["GroupNorm.eps"])
@BACKENDS
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_a_pack_writes_is_another_network_until_it_is_put_back(
    file: Path, library: Library, backend: str, setting: str
) -> None:
    layer_of, name, value = SETTINGS[setting]
    reference, patched = natively(file), Patched(load(file), library, backend)
    assert error(patched.sample(), reference) <= LIMIT
    layer, other = layer_of(patched.native), load(file)
    before = getattr(layer, name)
    setattr(layer, name, value)
    setattr(layer_of(other), name, value)
    native = sample(other)
    assert error(native, reference) > 1e-3, "it does nothing here"
    assert error(patched.sample(), native) <= LIMIT
    setattr(layer, name, before)
    assert error(patched.sample(), reference) <= LIMIT
    assert patched.counts == (STEPS, 0)


@BACKENDS
def test_a_setting_that_was_written_when_the_model_was_first_seen_can_be_put_back(
    file: Path, library: Library, backend: str
) -> None:
    model = load(file)
    before, norm_of(model).eps = norm_of(model).eps, 0.5
    patched = Patched(model, library, backend)
    patched.sample()
    norm_of(model).eps = before
    assert error(patched.sample(), natively(file)) <= LIMIT
    assert patched.counts == (STEPS, 0)


@BACKENDS
def test_a_setting_that_was_written_before_the_model_was_seen_is_another_network(
    file: Path, library: Library, backend: str
) -> None:
    model, other = load(file), load(file)
    for one in (model, other):
        norm_of(one).eps = 0.5
    native, patched = sample(other), Patched(model, library, backend)
    assert error(native, natively(file)) > 1e-3
    assert error(patched.sample(), native) <= LIMIT


def changing(model: ModelPatcher, change: Callable[[torch.nn.Module], Callable[[], None]], calls: set[int]) -> Any:
    """A model whose middle a wrapper changes in some calls alone; ``change`` gives what takes it back."""
    other, count = model.clone(), iter(range(1000))
    layer = other.model.diffusion_model.middle_block[0]

    def step(call: Callable, given: dict) -> torch.Tensor:
        back = change(layer) if next(count) in calls else lambda: None
        try:
            return call(given["input"], given["timestep"], **given["c"])
        finally:
            back()

    other.set_model_unet_function_wrapper(step)
    return other


def with_a_hook(layer: torch.nn.Module) -> Callable[[], None]:
    return layer.register_forward_hook(lambda _l, _a, result: result * 0.5).remove


def with_a_hook_before(layer: torch.nn.Module) -> Callable[[], None]:
    return layer.register_forward_pre_hook(lambda _l, args: (args[0] * 0.5, *args[1:])).remove


def with_a_hook_on_all_layers(layer: torch.nn.Module) -> Callable[[], None]:
    kind = type(layer.in_layers[0])
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda one, _a, result: result * 0.9 if isinstance(one, kind) else None)  # fmt: skip
    return hook.remove


def with_another_forward(layer: torch.nn.Module) -> Callable[[], None]:
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5
    return lambda: layer.__dict__.pop("forward")


def with_another_forward_put_back(layer: torch.nn.Module) -> Callable[[], None]:
    """As packs do that write the method back that they have read."""
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5
    return lambda: setattr(layer, "forward", own)


CHANGES = (with_a_hook, with_a_hook_before, with_a_hook_on_all_layers, with_another_forward,
           with_another_forward_put_back)  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "change"), [*(("onnxruntime", change) for change in CHANGES), ("torch", with_another_forward)])
def test_a_layer_that_is_changed_for_some_calls_of_a_run_is_natives_in_these(
    file: Path, library: Library, backend: str, change: Callable
) -> None:
    native = sample(changing(load(file), change, {1, 3}))
    assert error(native, natively(file)) > 1e-3
    patched = Patched(load(file), library, backend)
    patched.sample()
    patched.model = changing(patched.model, change, {1, 3})
    assert error(patched.sample(), native) <= LIMIT
    assert patched.counts == (STEPS - 2, 2)


def test_runs_of_one_execution_are_looked_at_one_by_one(file: Path, library: Library) -> None:
    from patched import sampling_node

    reference, patched = natively(file), Patched(load(file), library)
    layer = norm_of(patched.native)
    with sampling_node():
        assert error(sample(patched.model), reference) <= LIMIT
        layer.eps = 0.5
        other = load(file)
        norm_of(other).eps = 0.5
        assert error(sample(patched.model), sample(other)) == 0
        layer.eps = norm_of(load(file)).eps
        assert error(sample(patched.model), reference) <= LIMIT
    assert patched.counts == (2 * STEPS, STEPS)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each call that looks at the layers."""
    looked, own = [], LayerWatch.look_again

    def look_again(self: LayerWatch) -> str | None:
        looked.append("again")
        return own(self)

    monkeypatch.setattr(LayerWatch, "look_again", look_again)
    return looked


def plainly_sampled(model: ModelPatcher, guider: type = comfy.samplers.CFGGuider, **options: Any) -> None:
    """As ComfyUI samples with nobody else taking part."""
    prompts = {name: [[torch.randn(1, 77, 768), {}]] for name in ("positive", "negative")}
    guide, noise = guider(model), torch.randn(1, 4, 8, 8)
    guide.set_conds(**prompts)
    given = {"sampler": comfy.samplers.sampler_object("euler"), "sigmas": torch.tensor([10.0, 1.0, 0.0])} | options
    with torch.inference_mode():
        guide.sample(noise, torch.zeros_like(noise), disable_pbar=True, **given)


class OtherGuider(comfy.samplers.CFGGuider):
    pass


def other_sampler(model: Any, x: torch.Tensor, sigmas: torch.Tensor, **options: Any) -> torch.Tensor:
    return comfy.samplers.k_diffusion_sampling.sample_euler(model, x, sigmas, **options)


def patched_after(model: ModelPatcher) -> ModelPatcher:
    other = model.clone()
    other.set_model_sampler_post_cfg_function(lambda given: given["denoised"])
    return other


def test_layers_are_looked_at_in_each_call_where_other_packs_take_part_in_a_run_and_in_no_other(
    file: Path, library: Library, looks: list[str]
) -> None:
    model = Patched(load(file), library).model
    runs: list[tuple[bool, Callable[[], None]]] = [
        (False, lambda: plainly_sampled(model)),
        (True, lambda: plainly_sampled(model, OtherGuider)),
        (True, lambda: plainly_sampled(model, sampler=comfy.samplers.KSAMPLER(other_sampler))),
        (True, lambda: plainly_sampled(model, callback=lambda *_: None)),
        (True, lambda: plainly_sampled(patched_after(model))),
        (False, lambda: plainly_sampled(model)),
    ]
    for others, run in runs:
        looks.clear()
        run()
        assert len(looks) == (2 if others else 0)


def in_place(layer: torch.nn.Module) -> None:
    layer.weight.data.mul_(0.5)


def other_parameter(layer: torch.nn.Module) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5, requires_grad=False)


def other_data(layer: torch.nn.Module) -> None:
    layer.weight.data = layer.weight.data * 0.5


EDITS = (in_place, other_parameter, other_data)


def edited(model: ModelPatcher, edit: Callable[[torch.nn.Module], None]) -> ModelPatcher:
    with torch.inference_mode():
        edit(model.model.diffusion_model.middle_block[0].in_layers[2])
    return model


@pytest.mark.fault("another pack writes to weights after the engine node",
                   see="normal speed with a reason, or the new weights")
@slow.when("torch", but=["in_place"])
@BACKENDS
@pytest.mark.parametrize("edit", EDITS)
def test_weights_that_a_pack_writes_to_after_the_engine_node_act_as_in_native(
    file: Path, library: Library, backend: str, edit: Callable
) -> None:
    native = sample(edited(load(file), edit))
    patched = Patched(load(file), library, backend)
    reference = patched.sample()
    assert error(native, reference) > 1e-3
    edited(patched.native, edit)
    assert error(patched.sample(), native) <= LIMIT


@BACKENDS
@pytest.mark.parametrize("edit", [in_place, other_data])
def test_weights_that_a_pack_writes_to_before_the_engine_node_act_as_in_native(
    file: Path, library: Library, backend: str, edit: Callable
) -> None:
    native, patched = sample(edited(load(file), edit)), Patched(edited(load(file), edit), library, backend)
    assert error(patched.sample(), native) <= LIMIT


def other_code(_net: torch.nn.Module) -> Callable[[], None]:
    own = cldm.ControlNet.forward
    cldm.ControlNet.forward = lambda *args, **kwargs: scaled(own(*args, **kwargs))
    return lambda: setattr(cldm.ControlNet, "forward", own)


def scaled(result: dict) -> dict:
    return {name: [part * 0.5 for part in parts] for name, parts in result.items()}


def hooked_control(net: torch.nn.Module) -> Callable[[], None]:
    return with_a_hook(net.middle_block[0])


def edited_control(net: torch.nn.Module) -> Callable[[], None]:
    net.zero_convs[0][0].weight.data.mul_(2.0)
    return lambda: net.zero_convs[0][0].weight.data.mul_(0.5)


@pytest.mark.fault("another pack changes a ControlNet", see="normal speed with a reason")
@pytest.mark.parametrize("change", [other_code, hooked_control, edited_control])
def test_a_controlnet_that_a_pack_changes_acts_as_in_native(controlled: Controlled, change: Callable) -> None:
    def native() -> torch.Tensor:
        return sample(controlled.model, control=controlled.plain)

    reference = native()
    assert error(controlled.sample(), reference) <= LIMIT
    with torch.inference_mode():
        back = change(controlled.native.model)
    try:
        changed = native()
        assert error(changed, reference) > 1e-3, "it does nothing here"
        assert error(controlled.sample(), changed) <= LIMIT
    finally:
        with torch.inference_mode():
            back()
    assert error(controlled.sample(), reference) <= LIMIT
    assert controlled.handle.stats.engine == STEPS
