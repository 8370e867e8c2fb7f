"""Anima with LLLite: one engine computes both networks, and gives native's results; else a reason is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.sd
import lllite
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from compiling import COMPILES
from hybrid_trt.architectures.shapes import Profile
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from lllite_sampling import TOGETHER, WIDTH, mask, model, other, own_sampling, patch, patched
from token_calls import Call, Patched, engine_of, natively, profile_of

__all__ = ["model", "other", "patch"]  # fixtures: pytest finds them by name

LIMIT = 1e-5
SIZES = {"two lengths": ({"words": (9, 30)}, 6), "odd sides": ({"size": (13, 11), **TOGETHER}, 3),
         "no guidance": ({"cfg": 1.0, "words": (77, 1)}, 3)}  # fmt: skip


def results(
    net: NativeNetwork, model: ModelPatcher, call: dict[str, Any], session: LiveSession | None = None
) -> tuple[torch.Tensor, ...]:
    """A call's results: the engine's, native's, and native's without the patch."""
    given = lllite.given(model, call)
    session = session or LiveSession(net, backends()["torch"], net.precision)
    session.sync_from(net, model)
    with torch.inference_mode():
        expected = net.parts[0].module(**given)
        bound = net.architecture().binding(net.module)(given)
        return bound.finish(session.run(bound.inputs, bound.extras)), expected, natively(net.parts[0], call)


@pytest.mark.parametrize("strength", [0.0, 0.7, 1.0, -2.5])
def test_calls_give_natives_result(models: dict[str, Path], patch: ModelPatcher, strength: float) -> None:
    native = lllite.behind(lllite.anima(models), patch, strength=strength)
    net = lllite.network(native)
    assert net.architecture().name == "anima_lllite"
    for call in (Call(), Call(2, (13, 11), 30), Call(words=1), Call(3, (5, 9), 128)):
        found, expected, plain = results(net, native, call.drawn(WIDTH))
        assert relative_error(found, expected) <= LIMIT, call
        assert (relative_error(plain, expected) > 1000 * LIMIT) is (strength != 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_to_float32_as_native_is(
    models: dict[str, Path], patch: ModelPatcher, dtype: torch.dtype
) -> None:
    call = Call(2, (13, 11), 30).drawn(WIDTH)
    narrow = {name: value if name == "timesteps" else value.to(dtype) for name, value in call.items()}
    exact, half = lllite.behind(lllite.anima(models), patch), lllite.behind(lllite.anima(models, dtype), patch)
    wanted = results(lllite.network(exact), exact, call)[1]
    found, native, _ = results(lllite.network(half), half, narrow)
    assert found.dtype == dtype
    assert relative_error(found.float(), wanted) <= 1.1 * relative_error(native.float(), wanted)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_at_any_strength_give_natives_latent(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, backend: str
) -> None:
    if backend == "onnxruntime":
        engine = engine_of(lllite.network(lllite.behind(model, patch)), tmp_path)
        assert engine.manifest.parity["rel_err"] <= LIMIT
        assert {spec.name for spec in engine.manifest.inputs} >= {"control", "strength", "context"}
    plain, session = own_sampling(model), None
    for strength in (0.0, 0.7, 1.0):
        native = lllite.behind(model, patch, strength=strength)
        ours = patched(native, tmp_path, backend)
        for name, (options, calls) in SIZES.items():
            expected = own_sampling(native, **options)
            assert relative_error(ours.sample(WIDTH, **options), expected) <= LIMIT, (strength, name)
            assert ours.counts == (calls, 0), ours.handle.stats.reasons
        assert (relative_error(own_sampling(native), plain) > 1000 * LIMIT) is (strength != 0)
        session = session or ours.handle.session
        assert ours.handle.session is session, "one session serves every strength"


def test_a_control_image_is_embedded_once_per_run(model: ModelPatcher, patch: ModelPatcher, tmp_path: Path) -> None:
    ours = patched(lllite.behind(model, patch, lllite.image(height=90, width=200)), tmp_path)
    ours.sample(WIDTH)
    passes = ours.handle.session.live.passes
    before = passes.computed
    ours.sample(WIDTH)
    assert passes.computed == before + 1


@pytest.mark.parametrize(("start", "end", "acting"), [(0.0, 0.4, 1), (0.3, 0.8, 1), (0.5, 1.0, 1), (0.9, 1.0, 0)])
def test_it_acts_in_the_steps_of_its_range(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, start: float, end: float, acting: int
) -> None:
    native = lllite.behind(model, patch, start=start, end=end)
    expected = own_sampling(native)
    others = own_sampling(model), own_sampling(lllite.behind(model, patch))
    assert relative_error(others[1], expected) > 1000 * LIMIT
    assert (relative_error(others[0], expected) > 100 * LIMIT) is bool(acting)
    ours = patched(native, tmp_path)
    assert relative_error(ours.sample(WIDTH, **TOGETHER), expected) <= LIMIT
    assert ours.counts == (3, 0)


def test_the_ends_of_its_range_are_natives_to_the_last_bit(model: ModelPatcher, patch: ModelPatcher) -> None:
    """A step may lie at an end of the range itself."""
    one = lllite.behind(model, patch)
    net = lllite.network(one)
    bind, own = net.architecture().binding(net.module), one.model_options["transformer_options"]["patches"]
    at = torch.tensor([0.3, 0.6], dtype=torch.float32)
    for end, start in ((0.5, 0.6), (0.5, at[1].item()), (at[1].item(), 1.0), (0.6, 1.0), (0.0, 0.5)):
        (acts,) = own["post_input"]
        acts.sigma_start, acts.sigma_end = start, end
        x, data = Call().drawn(WIDTH)["x"], {}
        acts({"x": x, "transformer_options": {"sigmas": at, "model_patch_data": data}})
        call = Call().drawn(WIDTH) | {"transformer_options": {"patches": own, "sigmas": at}}
        assert bool(bind(call).inputs["strength"]) is bool(data), (start, end)


def test_inpainting_and_its_mask_are_served(models: dict[str, Path], model: ModelPatcher, tmp_path: Path) -> None:
    latents = []
    for masked in ("false", "true"):
        own = lllite.load(models, "tiny_anima_lllite_inpaint", inpaint_masked_input=masked)
        for given in (mask(), mask(90, 60), None):
            native = lllite.behind(model, own, mask=given)
            latents.append(own_sampling(native))
            ours = patched(native, tmp_path)
            assert relative_error(ours.sample(WIDTH, **TOGETHER), latents[-1]) <= LIMIT
            assert ours.counts == (3, 0)
    latents.pop()  # without a mask the image is whole
    assert all(relative_error(a, b) > 100 * LIMIT for i, a in enumerate(latents) for b in latents[:i])


def test_control_goes_on_and_off_between_prompts(model: ModelPatcher, patch: ModelPatcher, tmp_path: Path) -> None:
    kinds = []
    for native in (lllite.behind(model, patch), model, lllite.behind(model, patch, lllite.image(5))):
        ours = patched(native, tmp_path)
        assert relative_error(ours.sample(WIDTH, **TOGETHER), own_sampling(native)) <= LIMIT
        assert ours.counts == (3, 0)
        kinds.append(ours.handle.network.architecture().name)
    assert kinds == ["anima_lllite", "anima", "anima_lllite"]


def lora() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"diffusion_model.blocks.{i}.{layer}.lora_{part}.weight": 0.1 * torch.randn(shape, generator=generator)
            for i in range(2) for layer in ("self_attn.q_proj", "cross_attn.output_proj")
            for part, shape in (("A", (4, 256)), ("B", (256, 4)))}  # fmt: skip


def with_lora(model: ModelPatcher, strength: float) -> ModelPatcher:
    return comfy.sd.load_lora_for_models(model, None, lora(), strength, 0)[0]


def test_loras_before_and_behind_the_engine_are_followed(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    plain = own_sampling(lllite.behind(model, patch))
    for before, behind in ((0.8, 0.0), (0.0, 0.6), (0.5, 0.4)):
        native = lllite.behind(with_lora(model, before), patch)
        ours = patched(native, tmp_path)
        ours.model = with_lora(ours.model, behind)
        expected = own_sampling(with_lora(native, behind))
        assert relative_error(plain, expected) > 100 * LIMIT
        assert relative_error(ours.sample(WIDTH, **TOGETHER), expected) <= LIMIT
        assert ours.counts == (3, 0)


def test_another_file_is_served_with_its_own_weights(
    model: ModelPatcher, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    latents = []
    for one in (patch, other, patch):
        native = lllite.behind(model, one)
        ours = patched(native, tmp_path)
        latents.append(own_sampling(native))
        assert relative_error(ours.sample(WIDTH, **TOGETHER), latents[-1]) <= LIMIT
        assert ours.counts == (3, 0)
    assert relative_error(latents[1], latents[0]) > 100 * LIMIT


@pytest.mark.slow
def test_an_engine_of_onnx_runtime_serves_its_two_files_and_no_other(
    model: ModelPatcher, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    own = lllite.behind(model, patch)
    engine_of(lllite.network(own), tmp_path)
    ours = patched(own, tmp_path, "onnxruntime")
    ours.model = with_lora(ours.model, 0.8)
    assert relative_error(ours.sample(WIDTH, **TOGETHER), own_sampling(with_lora(own, 0.8))) <= LIMIT
    assert list(ours.handle.stats.reasons) == [Reason.WEIGHTS_PATCHED.value]
    for native in (model, lllite.behind(model, other), lllite.behind(with_lora(model, 0.8), patch)):
        ours = patched(native, tmp_path, "onnxruntime")
        assert relative_error(ours.sample(WIDTH, **TOGETHER), own_sampling(native)) <= LIMIT
        assert list(ours.handle.stats.reasons) == [Reason.NO_ENGINE.value]


@pytest.mark.slow
@COMPILES
def test_calls_of_a_compiled_size_give_natives_result_at_any_strength_and_with_another_file(
    models: dict[str, Path], patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    model = lllite.anima(models)  # no sampling has put a LoRA into it
    net, call = lllite.network(lllite.behind(model, patch)), {"B": 2, "R": 4, "C": 3, "T": 97}
    order = BuildOrder(net, "float32", Profile.around([call]), backends()["torch"], calls=(call,))
    engine = build_engine(order, Library([tmp_path]), lambda *_: None)
    for one, strength in ((patch, 0.7), (patch, 0.2), (other, 1.0)):
        native = lllite.behind(model, one, strength=strength)
        session = LiveSession(lllite.network(native), backends()["torch"], "float32")
        session.use([engine])
        found, expected, plain = results(lllite.network(native), native, Call(2, words=9).drawn(WIDTH), session)
        assert relative_error(found, expected) <= LIMIT
        assert relative_error(plain, expected) > 1000 * LIMIT
        assert session.uncovered is None
        assert session.refusal is None


@pytest.mark.slow
def test_an_engine_for_any_weights_serves_other_files_of_both_networks(
    models: dict[str, Path], model: ModelPatcher, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    net = lllite.network(lllite.behind(model, patch))
    order = BuildOrder(net, "float32", profile_of(net), backends()["onnxruntime"], replaceable=True)
    build_engine(order, Library([tmp_path]), lambda *_: None, run=run_here)
    second, latents = lllite.anima(models), []
    for parameter in second.model.parameters():
        parameter.data *= 1.1
    for base, one in ((model, patch), (model, other), (second, patch), (with_lora(second, 0.5), other)):
        native = lllite.behind(base, one)
        ours = Patched(lllite.network(native), tmp_path, "onnxruntime", any_weights=True)
        latents.append(own_sampling(native))
        assert relative_error(ours.sample(WIDTH, **TOGETHER), latents[-1]) <= LIMIT
        assert ours.counts == (3, 0), ours.handle.stats.reasons
    assert all(relative_error(a, b) > 100 * LIMIT for i, a in enumerate(latents) for b in latents[:i])
