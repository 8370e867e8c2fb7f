"""Changes that other nodes make to a model, with or without a patch: never a wrong image, nor native for longer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.samplers
import comfy.sd
import pytest
import slow
import torch
from comfy.ldm.modules.diffusionmodules.mmdit import PatchEmbed
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection
from foreign_changes import Change, halved, with_hook, with_setting
from hybrid_trt.comfy_model.changed_layers import LayerWatch
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.nodes.engine_nodes import _for_model
from hybrid_trt.sampling.engine_status import status
from hybrid_trt.sampling.model_wrapper import patch_model
from memory_fixtures import file, library
from patched import LIMIT, NAME, Patched, built_here, load, natively, sampling_node, with_lora

from sampling import STEPS, error, sample

__all__ = ["file", "library"]  # fixtures: pytest finds them by name

PART = "diffusion_model.time_embed.1"


def with_another_part(model: Any) -> Any:
    other = model.clone()
    other.add_object_patch(PART, torch.nn.GELU())
    return other


def with_a_bypassed_lora(model: Any) -> Any:
    """As the node LoraLoaderBypass makes it."""
    layer = next(name for name, _ in model.model.named_modules() if name.endswith("attn2.to_k"))
    rows, columns = model.model.get_submodule(layer).weight.shape
    generator = torch.Generator().manual_seed(3)
    lora = {f"{layer}.lora_down.weight": torch.randn(4, columns, generator=generator),
            f"{layer}.lora_up.weight": torch.randn(rows, 4, generator=generator)}
    return comfy.sd.load_bypass_lora_for_models(model, None, lora, 1.0, 1.0)[0]


def with_an_injected_part(model: Any) -> Any:
    """As packs do that put motion modules into a network while it is sampled."""
    unet, own = model.model.diffusion_model, model.model.diffusion_model.time_embed[1]
    other, theirs = model.clone(), torch.nn.GELU()
    injection = PatcherInjection(
        inject=lambda _: unet.time_embed.__setitem__(1, theirs), eject=lambda _: unet.time_embed.__setitem__(1, own))
    other.set_injections("test", [injection])
    return other


BEFORE = (with_another_part, with_a_bypassed_lora, with_an_injected_part)


@slow.when("torch", but=["with_a_bypassed_lora"])
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("before", BEFORE)
def test_it_is_taken_back_as_long_as_the_node_is_there_too(
    file: Path, library: Library, backend: str, before: Any
) -> None:
    reference, model = natively(file), load(file)
    other, theirs = before(model), sample(before(load(file)))
    assert error(sample(other), reference) > 1e-2
    patched = Patched(model, library, backend)
    for _ in range(2):
        assert error(sample(other), theirs) <= LIMIT, "it has its own again"
        assert error(patched.sample(), reference) <= LIMIT
        assert patched.counts == (STEPS, 0)


@pytest.mark.parametrize("before", BEFORE)
def test_it_stays_on_a_model_that_is_sampled_while_its_engine_is_looked_up(
    file: Path, library: Library, before: Any
) -> None:
    model = load(file)
    patched, theirs = Patched(model, library), sample(before(load(file)))
    assert error(sample(before(model), step=lambda _: patched.handle.refresh()), theirs) <= LIMIT
    assert patched.sample() is not None
    assert patched.counts == (STEPS, 0)


def test_nothing_is_built_of_what_is_anothers(file: Path, tmp_path: Path) -> None:
    reference, model = natively(file), load(file)
    sample(with_another_part(model))
    network = NativeNetwork.of_model(model, NAME)
    with pytest.raises(Unavailable, match=f"another node's {PART} lies on the model"):
        built_here(network, Library([tmp_path]))
    network.undo_foreign_patches()  # as the engine node does
    built_here(network, Library([tmp_path]))
    patched = Patched(load(file), Library([tmp_path]), "onnxruntime")
    assert error(patched.sample(), reference) <= LIMIT
    assert patched.counts == (STEPS, 0)


def changed(change: Change, *models: ModelPatcher) -> contextlib.ExitStack:
    """Models whose networks are changed in place, to be put back."""
    stack = contextlib.ExitStack()
    for model in models:
        stack.enter_context(change(model.model.diffusion_model))
    return stack


@contextlib.contextmanager
def tiled(net: torch.nn.Module) -> Iterator[None]:
    """Circular padding, put on the layers themselves, as packs for seamless tiles do."""

    def conv_forward(self: Any, given: Any, weight: Any, bias: Any) -> Any:
        given = torch.nn.functional.pad(given, self._reversed_padding_repeated_twice, mode="circular")
        return torch.nn.functional.conv2d(given, weight, bias, self.stride, 0, self.dilation, self.groups)

    layers = [layer for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    for layer in layers:
        layer._conv_forward = conv_forward.__get__(layer, torch.nn.Conv2d)
    yield
    for layer in layers:
        del layer._conv_forward


@contextlib.contextmanager
def padded(net: torch.nn.Module) -> Iterator[None]:
    """The same tiles by the layers' own setting."""
    layers = [layer for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    for layer in layers:
        layer.padding_mode = "circular"
    yield
    for layer in layers:
        layer.padding_mode = "zeros"


class Halved(torch.nn.SiLU):
    """A layer of another pack's own."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(given)


def with_layer(number: int, other: Callable[[torch.nn.Module], torch.nn.Module]) -> Change:
    """Put another layer in the place of one, which whoever does so keeps."""

    @contextlib.contextmanager
    def change(net: torch.nn.Module) -> Iterator[None]:
        own = net.time_embed[number]
        net.time_embed[number] = other(own)
        yield
        net.time_embed[number] = own

    return change


def written(write: Callable[[torch.nn.Module], None]) -> Change:
    """Write to the weights of a layer for good."""

    @contextlib.contextmanager
    def change(net: torch.nn.Module) -> Iterator[None]:
        with torch.inference_mode():
            write(net.middle_block[0].in_layers[2])
        yield

    return change


def in_place(layer: torch.nn.Module) -> None:
    layer.weight.data.mul_(0.5)


def other_parameter(layer: torch.nn.Module) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5, requires_grad=False)


def other_data(layer: torch.nn.Module) -> None:
    layer.weight.data = layer.weight.data * 0.5


GELU, HEADS = "a layer that ComfyUI has too", "a setting of attention"
THEIR_LAYER, NORM = "a layer of their own", "a setting of a norm"
NATIVES: dict[str, Change] = {
    "seamless tiles": tiled, "a hook": with_hook("time_embed"), "padding": padded,
    THEIR_LAYER: with_layer(1, lambda _: Halved()),
}  # fmt: skip
ANOTHER_NETWORK: dict[str, Change] = {
    GELU: with_layer(1, lambda _: torch.nn.GELU()), "a layer with other weights": with_layer(2, halved),
    NORM: with_setting("middle_block.0.in_layers.0", "eps", lambda _: 0.5),
    HEADS: with_setting("input_blocks.1.1.transformer_blocks.0.attn1", "heads", lambda _: 1),
}  # fmt: skip
WRITTEN = {one.__name__: written(one) for one in (in_place, other_parameter, other_data)}
CHANGES = NATIVES | ANOTHER_NETWORK | WRITTEN
BACKENDS = pytest.mark.parametrize("backend", ["onnxruntime", "torch"])


@pytest.mark.fault("another node changes layers in place (seamless tiles)",
                   see="normal speed: *changed by another node*")
@slow.when("torch", but=["seamless tiles", GELU, "a layer with other weights", HEADS])
@slow.when(HEADS, but=["torch"])
@BACKENDS
@pytest.mark.parametrize("what", NATIVES | ANOTHER_NETWORK)
def test_what_was_changed_in_place_acts_as_in_native_until_it_is_put_back(
    file: Path, library: Library, backend: str, what: str
) -> None:
    native, model = load(file), load(file)
    patched = Patched(model, library, backend)
    for _ in range(2):  # before its first sampling, and after it
        with changed(CHANGES[what], native, model):
            expected = sample(native)
            assert error(expected, natively(file)) > 1e-3, "it does nothing here"
            assert error(patched.sample(), expected) <= LIMIT
            live = backend == "torch" and what in ANOTHER_NETWORK  # there is no file for it
            assert patched.counts == ((STEPS, 0) if live else (0, STEPS))
            if what in NATIVES:
                assert list(patched.handle.stats.reasons) == [Reason.MODEL_PATCHED.value]
        assert error(patched.sample(), natively(file)) <= LIMIT
        assert patched.counts == (STEPS, 0)


@pytest.mark.fault("another pack writes to weights after the engine node",
                   see="normal speed with a reason, or the new weights")
@slow.when("torch", but=["in_place"])
@BACKENDS
@pytest.mark.parametrize("write", WRITTEN)
def test_weights_that_a_pack_writes_to_after_the_engine_node_act_as_in_native(
    file: Path, library: Library, backend: str, write: str
) -> None:
    native, patched = load(file), Patched(load(file), library, backend)
    reference = patched.sample()
    with changed(WRITTEN[write], native, patched.native):
        expected = sample(native)
        assert error(expected, reference) > 1e-3
        assert error(patched.sample(), expected) <= LIMIT


@slow.when("torch", but=[THEIR_LAYER])
@BACKENDS
@pytest.mark.parametrize("what", [THEIR_LAYER, NORM, "in_place", "other_data"])
def test_what_was_changed_before_the_engine_node_acts_as_in_native(
    file: Path, library: Library, backend: str, what: str
) -> None:
    native, model = load(file), load(file)
    with changed(CHANGES[what], native, model):
        expected = sample(native)
        assert error(expected, natively(file)) > 1e-3
        patched = Patched(model, library, backend)
        assert error(patched.sample(), expected) <= LIMIT
        if what == THEIR_LAYER:
            assert patched.counts == (0, STEPS)
            assert "time_embed.1 is a Halved of another pack" in status(patched.handle)
    if what == NORM:
        assert error(patched.sample(), natively(file)) <= LIMIT
        assert patched.counts == (STEPS, 0), "it has its own again"


def test_padding_is_looked_at_on_convolutions_alone() -> None:
    """The layer by which SD3 makes tokens of a latent has a setting of this name."""
    patches = PatchEmbed(img_size=None, embed_dim=8, bias=True, operations=torch.nn)
    assert patches.padding_mode == "circular"
    assert LayerWatch(patches).begin(adopt=True) is None
    patches.proj.padding_mode = "circular"
    assert "proj has a padding of another node" in LayerWatch(patches).begin(adopt=True)


@BACKENDS
def test_a_model_that_is_seen_first_while_it_is_sampled_is_the_engines_when_it_has_its_own_again(
    file: Path, library: Library, backend: str
) -> None:
    model, found = load(file), []
    sample(with_an_injected_part(model), step=lambda _: found or found.append(Patched(model, library, backend)))
    assert error(found[0].sample(), natively(file)) <= LIMIT
    assert found[0].counts == (STEPS, 0)


@slow.when(GELU)
@pytest.mark.parametrize("what", ["seamless tiles", GELU, "a layer with other weights"])
def test_a_file_that_was_loaded_twice_is_changed_in_one_model_alone(file: Path, library: Library, what: str) -> None:
    native, again, node = load(file), load(file), Patched(load(file), library)
    handle, refusal = _for_model(again, node.handle)
    model = patch_model(again, handle, refusal)
    with sampling_node():
        assert error(sample(model), sample(native)) <= LIMIT
    assert (handle.stats.engine, handle.session) == (STEPS, node.handle.session)
    with changed(CHANGES[what], native, again), sampling_node():
        assert error(sample(model), sample(native)) <= LIMIT
        assert handle.stats.native == STEPS
        assert error(node.sample(), natively(file)) <= LIMIT
        assert node.counts == (STEPS, 0)


@BACKENDS
def test_a_weight_wrapper_behind_the_engine_node_acts_as_in_native(file: Path, library: Library, backend: str) -> None:
    patched = Patched(load(file), library, backend)
    model, native = patched.model.clone(), load(file)
    for one in (model, native):
        one.add_weight_wrapper("diffusion_model.input_blocks.0.0.weight", lambda weight: 0.5 * weight)
    reference = sample(native)
    with sampling_node():
        latent = sample(model)
    assert error(latent, reference) <= LIMIT
    assert patched.counts == (0, STEPS)


def test_a_prompt_for_controlnets_alone_leaves_the_unet_on_its_engine(file: Path, library: Library) -> None:
    theirs = {"cross_attn_controlnet": torch.ones(1, 77, 768)}
    patched = Patched(load(file), library)
    assert error(patched.sample(**theirs), sample(load(file), **theirs)) <= LIMIT
    assert patched.counts == (STEPS, 0)


def guided_by_two(model: ModelPatcher, second: ModelPatcher) -> torch.Tensor:
    """A latent sampled as by the nodes Dual Model CFG Guider and SamplerCustomAdvanced: the negative prompt is the
    second model's, which ComfyUI loads without asking the wrappers on it."""
    from comfy_extras.nodes_custom_sampler import Guider_DualModel

    generator = torch.Generator().manual_seed(1)
    guider = Guider_DualModel(model, second)
    guider.set_conds(*([[torch.randn(1, 77, 768, generator=generator), {}]] for _ in range(2)))
    guider.set_cfg(4.0)
    noise = torch.randn(1, 4, 8, 8, generator=generator)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "normal", STEPS)
    euler = comfy.samplers.sampler_object("euler")
    with torch.inference_mode(), sampling_node():
        return guider.sample(noise, torch.zeros_like(noise), euler, sigmas, disable_pbar=True, seed=1)


@slow.when("torch", but=["with_lora"])
@slow.when("with_an_injected_part")
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("change", [with_lora, with_another_part, with_an_injected_part])
def test_the_second_model_of_a_guider_keeps_what_stands_behind_its_sampler_patch(
    file: Path, library: Library, backend: str, change: Any
) -> None:
    native = load(file)
    plain = guided_by_two(native, load(file))
    first, second = Patched(load(file), library, backend), Patched(load(file), library, backend)
    second.handle.node_id = "second"  # it is counted for itself
    assert error(guided_by_two(first.model, second.model), plain) <= LIMIT
    reference = guided_by_two(native, change(load(file)))
    assert error(reference, plain) > 1e-2
    for _ in range(2):  # a changed node's MODEL of the prompt before is gone
        assert error(guided_by_two(first.model, change(second.model)), reference) <= LIMIT
        assert first.counts == (STEPS, 0)
        assert second.counts == ((STEPS, 0) if change is with_lora and backend == "torch" else (0, STEPS))
    assert error(guided_by_two(first.model, second.model), plain) <= LIMIT
    assert second.counts == (STEPS, 0)
