"""Model patches with a network of their own: one engine computes both networks; else a reason is named."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slow
import torch
from absorbed_patches import KINDS, AbsorbedPatch, all_differ, places_of
from built_once import built_once
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph import DynamicPrompt
from compiling import COMPILES
from family_contract import LIMIT, difference, live
from fun import picture as control_image
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.backends import backends
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.page_api.workflow_graph import model_name, node_key
from token_calls import profile_of, uneven

LIKE_LLLITE = slow.when("zimage_fun")
"""LLLite shows it in less time."""


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> AbsorbedPatch:
    return request.param


@pytest.fixture(scope="module")
def model(models: dict[str, Path], kind: AbsorbedPatch) -> ModelPatcher:
    return kind.model(models)


@pytest.fixture(scope="module")
def patch(models: dict[str, Path], kind: AbsorbedPatch) -> ModelPatcher:
    return kind.patch(models, False)


@pytest.fixture(scope="module")
def other(models: dict[str, Path], kind: AbsorbedPatch) -> ModelPatcher:
    return kind.patch(models, True)


@pytest.mark.parametrize("strength", [0.0, 1.0, -2.5])
def test_calls_give_natives_result(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, strength: float
) -> None:
    native = kind.behind(model, patch, strength=strength)
    net = kind.network(native)
    assert net.architecture().name == kind.name
    for number, call in enumerate(kind.calls):
        found, expected, plain = kind.results(native, call.drawn(net))
        assert difference(found, expected) <= LIMIT, number
        assert (difference(plain, expected) > 1000 * LIMIT) is (strength != 0), number


@LIKE_LLLITE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_to_float32_as_native_is(
    models: dict[str, Path], kind: AbsorbedPatch, patch: ModelPatcher, dtype: torch.dtype
) -> None:
    exact, half = (kind.behind(kind.model(models, one), patch) for one in (None, dtype))
    call = kind.calls[1].drawn(kind.network(exact))
    narrow = {name: value.to(dtype) if torch.is_tensor(value) and name != "timesteps" else value
              for name, value in call.items()}  # fmt: skip
    wanted, (found, native, _) = kind.results(exact, call)[1], kind.results(half, narrow)
    assert found.dtype == dtype
    assert difference(found.float(), wanted) <= 1.1 * difference(native.float(), wanted)


@slow.when("zimage_fun", but=["torch"])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_whole_prompts_at_any_strength_give_natives_latent(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, backend: str
) -> None:
    if backend == "onnxruntime":
        engine = kind.family.engine(kind.network(kind.behind(model, patch)), tmp_path)
        assert {spec.name for spec in engine.manifest.inputs} >= {"control", "strength"}
    plain, sessions = kind.prompt.sample(model), []
    for strength in (0.0, 0.7, 1.0):
        native = kind.behind(model, patch, strength=strength)
        engine = kind.patched(native, tmp_path, backend)
        more = [kind.family.prompts[name] for name in kind.prompts] if strength == 0.7 else []
        latents = [prompt.sample(native) for prompt in (kind.prompt, *more)]
        for prompt, expected in zip((kind.prompt, *more), latents, strict=True):
            assert relative_error(prompt.sample(engine.model), expected) <= LIMIT, (strength, prompt)
            assert engine.counts == (prompt.calls, 0), engine.handle.stats.reasons
        assert (relative_error(latents[0], plain) > 1000 * LIMIT) is (strength != 0)
        sessions.append(engine.handle.session)
    assert all(one is sessions[0] for one in sessions), "one session serves every strength"


def test_a_control_image_of_another_size_is_embedded_once_per_run(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    native = kind.behind(model, patch, control_image(height=90, width=200))
    engine, prompt = kind.patched(native, tmp_path), replace(kind.prompt, cfg=1.0)
    assert relative_error(prompt.sample(engine.model), prompt.sample(native)) <= LIMIT
    passes = engine.handle.session.live.passes
    before = passes.computed
    prompt.sample(engine.model)
    assert passes.computed == before + kind.passes


def test_inpainting_and_its_mask_are_served(
    models: dict[str, Path], kind: AbsorbedPatch, model: ModelPatcher, tmp_path: Path
) -> None:
    all_differ([kind.served(native, tmp_path) for native in kind.inpainting(models, model)][:5])


@LIKE_LLLITE
def test_another_file_is_served_with_its_own_weights(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    latents = [kind.served(kind.behind(model, one), tmp_path) for one in (patch, other, patch)]
    all_differ(latents[:2])


@LIKE_LLLITE
def test_loras_before_and_behind_the_engine_are_followed(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    plain = kind.prompt.sample(kind.behind(model, patch))
    for before, behind in ((0.8, 0.0), (0.0, 0.6), (0.5, 0.4)):
        native = kind.behind(kind.with_lora(model, before), patch)
        engine = kind.patched(native, tmp_path)
        expected = kind.prompt.sample(kind.with_lora(native, behind))
        assert relative_error(plain, expected) > 100 * LIMIT
        assert relative_error(kind.prompt.sample(kind.with_lora(engine.model, behind)), expected) <= LIMIT
        assert engine.counts == (kind.prompt.calls, 0)


@slow.when("anima_lllite")
def test_an_engine_of_onnx_runtime_serves_its_two_files_and_no_other(
    models: dict[str, Path], kind: AbsorbedPatch, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    model = kind.model(models)
    own = kind.behind(model, patch)
    kind.family.engine(kind.network(own), tmp_path)
    engine = kind.patched(own, tmp_path, "onnxruntime")
    expected = kind.prompt.sample(kind.with_lora(own, 0.8))
    assert relative_error(kind.prompt.sample(kind.with_lora(engine.model, 0.8)), expected) <= LIMIT
    assert list(engine.handle.stats.reasons) == [Reason.WEIGHTS_PATCHED.value], "a LoRA behind it"
    for native in (model, kind.behind(model, other), kind.behind(kind.with_lora(model, 0.8), patch)):
        engine = kind.patched(native, tmp_path, "onnxruntime")
        assert relative_error(kind.prompt.sample(engine.model), kind.prompt.sample(native)) <= LIMIT
        assert list(engine.handle.stats.reasons) == [Reason.NO_ENGINE.value]


@pytest.mark.slow
@COMPILES
def test_calls_of_a_compiled_engine_give_natives_result_at_any_strength_and_with_another_file(
    models: dict[str, Path], kind: AbsorbedPatch, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    model = kind.model(models)  # no sampling has put a LoRA into it
    net = kind.network(kind.behind(model, patch))
    call = kind.calls[0].drawn(net)
    order = BuildOrder(net, "float32", profile_of(net), backends()["torch"])
    engine = build_engine(order, Library([tmp_path]), lambda *_: None)
    for one, strength in ((patch, 0.7), (patch, 0.2), (other, 1.0)):
        native = kind.behind(model, one, strength=strength)
        session = live(kind.network(native))
        session.use([engine])
        found, expected, plain = kind.results(native, call, session)
        assert difference(found, expected) <= LIMIT
        assert difference(plain, expected) > 1000 * LIMIT
        assert session.uncovered is None
        assert session.refusal is None


@pytest.mark.slow
def test_an_engine_for_any_weights_serves_other_files_of_both_networks_and_loras(
    models: dict[str, Path], kind: AbsorbedPatch, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path
) -> None:
    model, second = kind.model(models), kind.model(models)
    net = kind.network(kind.behind(model, patch))
    built_once(BuildOrder(net, "float32", profile_of(net), backends()["onnxruntime"], replaceable=True),
               Library([tmp_path]))  # fmt: skip
    for parameter in second.model.parameters():
        parameter.data *= 1.1
    all_differ([kind.served(kind.behind(base, one), tmp_path, "onnxruntime", True) for base, one in (
        (model, patch), (model, other), (second, patch), (kind.with_lora(second, 0.5), other),
        (kind.with_lora(model, 0.8), patch))])  # fmt: skip


Change = Callable[[AbsorbedPatch, ModelPatcher, ModelPatcher], ModelPatcher]


def beside(kind: AbsorbedPatch, native: ModelPatcher, _other: ModelPatcher) -> ModelPatcher:
    kind.beside(native)
    return native


def without_patches(_kind: AbsorbedPatch, native: ModelPatcher, _other: ModelPatcher) -> ModelPatcher:
    places_of(native).clear()
    return native


def with_other_file(kind: AbsorbedPatch, native: ModelPatcher, other: ModelPatcher) -> ModelPatcher:
    return kind.behind(without_patches(kind, native, other), other)


def with_two(kind: AbsorbedPatch, native: ModelPatcher, other: ModelPatcher) -> ModelPatcher:
    return kind.behind(native, other, control_image(7), 0.4)


def altered(kind: AbsorbedPatch, native: ModelPatcher, _other: ModelPatcher) -> ModelPatcher:
    (kind.altered or kind.beside)(native)
    return native


BEHIND = {
    "another patch beside it": (beside, Reason.MODEL_PATCHED, ""),
    "two at once": (with_two, Reason.MODEL_PATCHED, ""),
    "other layers": (altered, Reason.MODEL_PATCHED, ""),
    "none": (without_patches, Reason.OTHER_MODEL, "the model that is sampled has none"),
    "another file": (with_other_file, Reason.OTHER_MODEL, "the model that is sampled has that of another file"),
}


@slow.when("zimage_fun", {"another patch beside it"})
@pytest.mark.parametrize(("change", "reason", "words"), slow.cases(BEHIND, ()))
@pytest.mark.fault("a model is sampled with other patches than its engine computes",
                   see="normal speed: *changed by another node* or *engine of another model*")
def test_a_model_with_other_patches_than_at_the_engine_gives_natives_picture_and_a_reason(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, other: ModelPatcher, tmp_path: Path, caplog: Any,
    change: Change, reason: Reason, words: str,
) -> None:  # fmt: skip
    native = kind.behind(model, patch)
    engine, changed = kind.patched(native, tmp_path), kind.prompt.sample(change(kind, native.clone(), other))
    assert relative_error(kind.prompt.sample(native), changed) > 100 * LIMIT
    found = kind.prompt.sample(change(kind, engine.model.clone(), other))
    assert relative_error(found, changed) <= LIMIT
    assert engine.counts == (0, kind.prompt.calls)
    assert f"{reason.value}: " in caplog.text
    assert (words or kind.place) in caplog.text
    assert relative_error(kind.prompt.sample(engine.model), kind.prompt.sample(native)) <= LIMIT
    assert engine.counts == (kind.prompt.calls, 0), "with its own patch the engine serves again"


def test_a_patch_behind_the_engine_node_is_named_with_what_to_do(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, caplog: Any
) -> None:
    engine, expected = kind.patched(model, tmp_path), kind.prompt.sample(kind.behind(model, patch))
    assert relative_error(kind.prompt.sample(kind.behind(engine.model, patch)), expected) <= LIMIT
    assert engine.counts == (0, kind.prompt.calls)
    assert kind.place in caplog.text
    assert f"put the engine node behind {kind.node['class_type']}" in caplog.text


def test_several_control_images_at_once_give_natives_picture_and_a_reason(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, caplog: Any
) -> None:
    native = kind.behind(model, patch, control_image(images=2))
    engine, prompt = kind.patched(native, tmp_path), replace(
        kind.prompt, shape=(2, *kind.prompt.shape[1:]), cfg=1.0)  # fmt: skip
    assert relative_error(prompt.sample(engine.model), prompt.sample(native)) <= LIMIT
    assert engine.counts == (0, prompt.calls)
    assert f"{Reason.UNSUPPORTED_INPUT.value}: {kind.called} with 2 images at once" in caplog.text


def test_a_call_without_the_patch_is_refused_by_name(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher
) -> None:
    net = kind.network(kind.behind(model, patch))
    with pytest.raises(Unsupported, match=f"no {kind.called}, or"):
        net.architecture().binding(net.module)(kind.calls[0].drawn(net))


def test_patches_that_no_engine_computes_leave_the_model_its_own_engine(
    models: dict[str, Path], kind: AbsorbedPatch, model: ModelPatcher
) -> None:
    for native in kind.unserved(models, model):
        assert kind.network(native).architecture().name == kind.base


def replacement_of(own: Callable) -> Callable:
    """Another pack's function in the place of a method of ComfyUI's, which looks like that."""

    @functools.wraps(own)
    def replacement(self: Any, *given: Any, **options: Any) -> Any:
        found = own(self, *given, **options)
        if isinstance(found, dict):
            name = next(name for name in ("img", "img_input", "v", "x") if name in found)
            return {**found, name.removesuffix("_input"): uneven(found[name])}
        if isinstance(found, tuple):
            return tuple(part if part is None else uneven(part) for part in found)
        return uneven(found)

    return replacement


@pytest.mark.parametrize(("kind", "place", "name"), [
    pytest.param(kind, place, name, id=f"{place.__name__}.{name}") for kind in KINDS for place, name in kind.code
], indirect=["kind"], scope="module")  # fmt: skip
def test_code_of_another_pack_in_the_patch_is_natives(
    kind: AbsorbedPatch, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    place: type, name: str,
) -> None:  # fmt: skip
    native = kind.behind(model, patch)
    engine = kind.patched(native, tmp_path)
    before = kind.prompt.sample(engine.model)
    monkeypatch.setattr(place, name, replacement_of(getattr(place, name)))
    expected = kind.prompt.sample(native)
    assert relative_error(before, expected) > 100 * LIMIT
    assert relative_error(kind.prompt.sample(engine.model), expected) <= LIMIT
    assert engine.counts[0] == 0
    assert list(engine.handle.stats.reasons) == [Reason.MODEL_PATCHED.value]


def graph(kind: AbsorbedPatch) -> dict[str, Any]:
    """The prompt of an engine behind the patch, as the page sends it."""
    return {
        "unet": {"class_type": "UNETLoader", "inputs": {"unet_name": "model"}},
        "lora": {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["unet", 0], "lora_name": "lora"}},
        "file": {"class_type": "ModelPatchLoader", "inputs": {"name": "patch"}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "vae"}},
        "image": {"class_type": "LoadImage", "inputs": {"image": "one"}},
        "patch": copy.deepcopy(kind.node),
        "engine": {"class_type": "TRTUNetEngine", "inputs": {"model": ["patch", 0], "backend": "torch"}},
    }


@pytest.mark.parametrize(("node", "value", "same"), [
    ("patch", {"strength": 0.2}, True), ("patch", {"end_percent": 0.2}, True), ("image", {"image": "two"}, True),
    ("vae", {"vae_name": "other"}, True), ("file", {"name": "other"}, False), ("lora", {"lora_name": "other"}, False),
    ("engine", {"backend": "auto"}, False),
], ids=["strength", "range", "image", "VAE", "file of the patch", "LoRA", "backend"])  # fmt: skip
def test_a_node_on_the_page_is_the_same_for_all_images_strengths_and_ranges(
    kind: AbsorbedPatch, node: str, value: dict, same: bool
) -> None:
    changed = graph(kind)
    changed[node]["inputs"] |= value
    assert (node_key(changed, "engine") == node_key(graph(kind), "engine")) is same


def test_an_engine_is_called_by_the_models_file_and_not_by_that_of_its_vae(kind: AbsorbedPatch) -> None:
    assert model_name(DynamicPrompt(graph(kind)), "engine", "model", "") == "model"
