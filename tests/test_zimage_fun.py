"""Z-Image with Fun control: one engine computes both networks, and gives native's results; else a reason is named."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import fun
import pytest
import slow
import torch
import zimage
from built_once import built_once
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from compiling import COMPILES
from dynamic_vram import on_cpu
from fun_sampling import GIVEN, STEPS, TWO_ONE, A, B, C, call_of, lora_of, model, own_sampling, patch
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.joined_weights import JoinedWeights
from hybrid_trt.comfy_model.live_weights import LiveWeights
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import native_weights
from hybrid_trt.sessions.file_session import FileSession

__all__ = ["model", "patch"]  # fixtures: pytest finds them by name

LIMIT = 1e-5
SIZES = {
    "small": {"width": 6},
    "odd sides, two pictures": {"height": 13, "width": 11, "batch": 2, "tokens": 30},
    "a whole number of groups": {"height": 16, "width": 8, "tokens": 32},
    "many tokens": {"height": 10, "width": 34, "tokens": 100},
}


def order_of(net: NativeNetwork, backend: str, *calls: dict[str, int]) -> BuildOrder:
    profile = net.architecture().profile(RequestedSizes(64, 128, 256, 2))
    return BuildOrder(net, "float32", profile, backends()[backend], calls=calls)


def errors(session: Any, net: NativeNetwork, **sizes: int) -> tuple[float, float]:
    """Errors against native in a call: the engine's, and that of native without the patch."""
    given = call_of(net, **sizes)
    session.sync_from(net, net.patcher)
    with torch.inference_mode():
        expected = net.parts[0].module(**copy.copy(given))
        without = net.parts[0].module(**zimage.call(**sizes))
        bound = net.architecture().binding(net.module)(given)
        found = bound.finish(session.run(bound.inputs, bound.extras))
    return relative_error(found, expected), relative_error(without, expected)


@slow.when("2.0")
@pytest.mark.parametrize("version", fun.VERSIONS)
def test_calls_of_each_version_give_natives_result(version: str) -> None:
    layers, config = fun.VERSIONS[version]
    base, companion = zimage.network(n_layers=layers), fun.control(**config)
    for sizes, strength in zip(SIZES.values(), (0.0, 0.7, 1.0, -2.5), strict=True):
        net = fun.network(base, companion, strength=strength)
        assert net.architecture().name == "zimage_fun"
        error, effect = errors(LiveSession(net, backends()["torch"], "float32"), net, **sizes)
        assert error <= LIMIT, (sizes, strength)
        assert (effect > 1000 * LIMIT) is (strength != 0)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float8_e4m3fn])
def test_a_patch_stored_in_fewer_bits_is_cast_as_native_casts_it(dtype: torch.dtype) -> None:
    net = fun.network(zimage.network(n_layers=16), fun.control(dtype=dtype, **TWO_ONE))
    error, effect = errors(LiveSession(net, backends()["torch"], "float32"), net, width=6)
    assert error <= LIMIT
    assert effect > 1000 * LIMIT


def test_sizes_tell_the_tokens_of_the_control_image() -> None:
    family = fun.network(zimage.network(n_layers=16), fun.control(**TWO_ONE)).architecture()
    profile = family.profile(RequestedSizes())
    assert profile.to_json() == {"B": [1, 1, 2], "C": [993, 4096, 9216], "N": [32, 128, 288], "T": [1, 4, 17]}
    assert family.calls(profile, Picture(840, 1216, (1,))) == [{"B": 1, "N": 126, "T": 4, "C": 4028}]
    assert family.words(profile) == "1 image, 512 to 1536 px, 544 tokens"


@COMPILES
@pytest.mark.slow
def test_calls_of_a_compiled_size_give_natives_result_at_any_strength_and_with_another_file(tmp_path: Path) -> None:
    base, companion = zimage.network(n_layers=16), fun.control(**TWO_ONE)
    net = fun.network(base, companion)
    call = {"B": 1, "N": 1, "T": 1, "C": 12}
    engine = build_engine(order_of(net, "torch", call), Library([tmp_path]), lambda *_: None)
    for control, strength in ((companion, 0.7), (companion, 0.2), (fun.control(other=True, **TWO_ONE), 1.0)):
        net = fun.network(base, control, strength=strength)
        session = LiveSession(net, backends()["torch"], "float32")
        session.use([engine])
        error, effect = errors(session, net, width=6)
        assert error <= LIMIT
        assert effect > 1000 * LIMIT
        assert session.uncovered is None
        assert session.refusal is None


def test_whole_prompts_give_natives_latent_and_one_session_serves_every_strength(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    first, plain = None, own_sampling(model)
    for strength, sizes in ((0.0, {}), (0.7, {"batch": 2}), (1.0, {"size": (13, 11)}), (1.0, {"cfg": 1.0})):
        native = fun.with_fun(model, patch, strength=strength)
        expected = own_sampling(native, **sizes)
        patched = zimage.Patched(native, Library([tmp_path]))
        assert relative_error(patched.sample(*GIVEN, steps=STEPS, **sizes), expected) <= LIMIT, (strength, sizes)
        assert patched.counts[1] == 0
        first = first or patched.handle.session
        assert patched.handle.session is first
        if not sizes:
            assert relative_error(plain, expected) <= LIMIT, "native adds nothing at this strength"
        elif "batch" not in sizes and "size" not in sizes:
            assert relative_error(own_sampling(model, **sizes), expected) > 1000 * LIMIT


def test_prompts_of_other_lengths_and_a_control_image_of_another_size_are_served(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    vae = fun.PictureAsLatent()
    native = fun.with_fun(model, patch, fun.picture(height=90, width=70), vae=vae)
    area = {"area": (8, 4, 0, 2), "set_area_to_bounds": False, "strength": 1.0}
    given = [[C, {}]], [[B, {}]]
    patched = zimage.Patched(native, Library([tmp_path]))
    before, passes = vae.encoded, patched.encoded
    found = patched.sample(*given, steps=STEPS)
    assert patched.counts == (2 * STEPS, 0)
    assert vae.encoded == before + 2, "the image and the empty one beside it, for the picture's size"
    assert relative_error(found, zimage.sample(native, *given, steps=STEPS)) <= LIMIT
    assert patched.encoded == passes + 3, "two prompts and the control image, once each"
    given = [[C, {}], [A, area]], [[B, {}]]
    assert relative_error(patched.sample(*given, steps=STEPS), zimage.sample(native, *given, steps=STEPS)) <= LIMIT
    assert patched.counts[1] == 0, "a part of the picture has a control image of its size"


def test_inpainting_and_its_mask_are_served(model: ModelPatcher, patch: ModelPatcher, tmp_path: Path) -> None:
    mask = torch.zeros(1, 64, 48)
    mask[:, 20:50, 10:30] = 1
    ways = {"mask": {"inpaint_image": fun.picture(5), "mask": mask}, "no mask": {"inpaint_image": fun.picture(5)},
            "other sizes": {"inpaint_image": fun.picture(5, 80, 80), "mask": mask}, "control alone": {}}
    latents = []
    for name, options in ways.items():
        native = fun.with_fun(model, patch, **options)
        patched = zimage.Patched(native, Library([tmp_path]))
        latents.append(own_sampling(native))
        assert relative_error(patched.sample(*GIVEN, steps=STEPS), latents[-1]) <= LIMIT, name
        assert patched.counts[1] == 0, name
    assert all(relative_error(a, b) > 100 * LIMIT for i, a in enumerate(latents) for b in latents[:i])


LIKE_LLLITE = pytest.mark.slow
"""Another patch of a second network shows it in less time: ``test_anima_lllite.py``."""


@LIKE_LLLITE
def test_control_goes_on_and_off_between_prompts(model: ModelPatcher, patch: ModelPatcher, tmp_path: Path) -> None:
    library, kinds = Library([tmp_path]), []
    for on in (True, False, True):
        native = fun.with_fun(model, patch) if on else model
        patched = zimage.Patched(native, library)
        assert relative_error(patched.sample(*GIVEN, steps=STEPS), own_sampling(native)) <= LIMIT
        assert patched.counts == (2 * STEPS, 0)
        kinds.append(patched.handle.network.architecture().name)
    assert kinds == ["zimage_fun", "zimage", "zimage_fun"]


@LIKE_LLLITE
def test_another_file_of_the_same_layout_is_served_with_its_own_weights(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    latents = []
    for companion in (patch, fun.control(other=True, **TWO_ONE), patch):
        native = fun.with_fun(model, companion)
        patched = zimage.Patched(native, Library([tmp_path]))
        latents.append(own_sampling(native))
        assert relative_error(patched.sample(*GIVEN, steps=STEPS), latents[-1]) <= LIMIT
        assert patched.counts[1] == 0
    assert relative_error(latents[1], latents[0]) > 100 * LIMIT


@LIKE_LLLITE
def test_loras_before_and_behind_the_engine_are_followed(
    environment: Any, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    lora, plain = lora_of(environment), own_sampling(fun.with_fun(model, patch))

    def with_lora(given: ModelPatcher, strength: float) -> ModelPatcher:
        return comfy.sd.load_lora_for_models(given, None, lora, strength, 0)[0]

    for before, behind in ((0.8, 0.0), (0.0, 0.6), (0.5, 0.4)):
        native = fun.with_fun(with_lora(model, before), patch)
        patched = zimage.Patched(native, Library([tmp_path]))
        patched.model = with_lora(patched.model, behind)
        expected = own_sampling(with_lora(native, behind))
        assert relative_error(plain, expected) > 100 * LIMIT
        assert relative_error(patched.sample(*GIVEN, steps=STEPS), expected) <= LIMIT
        assert patched.counts[1] == 0


def test_values_that_another_node_writes_into_the_patch_are_followed(
    model: ModelPatcher, tmp_path: Path
) -> None:
    companion = fun.control(**TWO_ONE)
    native = fun.with_fun(model, companion)
    patched = zimage.Patched(native, Library([tmp_path]))
    before = patched.sample(*GIVEN, steps=STEPS)
    companion.model.control_layers[1].after_proj.weight.data.mul_(3)
    expected = own_sampling(native)
    assert relative_error(before, expected) > 100 * LIMIT
    assert relative_error(patched.sample(*GIVEN, steps=STEPS), expected) <= LIMIT
    assert patched.counts[1] == 0


def test_an_engine_of_onnx_runtime_serves_its_two_files_and_no_other(
    environment: Any, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    library = Library([tmp_path])
    net = NativeNetwork.of_model(fun.with_fun(model, patch), "zimage")
    engine = built_once(order_of(net, "onnxruntime"), library)
    assert engine.manifest.parity["rel_err"] <= LIMIT
    assert {spec.name for spec in engine.manifest.inputs} >= {"control", "strength", "prompt"}
    for strength, sizes in ((0.7, {}), (1.0, {"size": (13, 11), "batch": 2}), (0.0, {"size": (16, 8)})):
        native = fun.with_fun(model, patch, strength=strength)
        patched = zimage.Patched(native, library, "onnxruntime")
        found = patched.sample(*GIVEN, steps=STEPS, **sizes)
        assert relative_error(found, own_sampling(native, **sizes)) <= LIMIT, sizes
        assert patched.counts[1] == 0, sizes
    lora = lora_of(environment)
    patched.model = comfy.sd.load_lora_for_models(patched.model, None, lora, 0.8, 0)[0]
    native = comfy.sd.load_lora_for_models(native, None, lora, 0.8, 0)[0]
    assert relative_error(patched.sample(*GIVEN, steps=STEPS), own_sampling(native)) <= LIMIT
    assert list(patched.handle.stats.reasons) == [Reason.WEIGHTS_PATCHED.value], "a LoRA behind it"
    others = {"another file": fun.with_fun(model, fun.control(other=True, **TWO_ONE)), "no control": model,
              "a LoRA before it": native}
    for name, other in others.items():
        patched = zimage.Patched(other, library, "onnxruntime")
        assert relative_error(patched.sample(*GIVEN, steps=STEPS), own_sampling(other)) <= LIMIT
        assert list(patched.handle.stats.reasons) == [Reason.NO_ENGINE.value], name


def test_under_dynamic_vram_the_weights_of_both_are_followed(model: ModelPatcher, tmp_path: Path) -> None:
    """A double of it, whose native calls leave LoRAs out."""
    base = on_cpu(fun.model())
    for other in (False, True):
        companion = fun.control(other=other, **TWO_ONE)
        expected = own_sampling(fun.with_fun(model, companion))
        patched = zimage.Patched(fun.with_fun(base, on_cpu(companion)), Library([tmp_path]))
        assert relative_error(own_sampling(patched.native), expected) == 0
        assert relative_error(patched.sample(*GIVEN, steps=STEPS), expected) <= LIMIT
        assert patched.counts[1] == 0


@pytest.mark.slow
def test_the_patchs_native_weights_are_loaded_for_native_alone(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double: the pack takes the CPU for a device whose memory is not the main memory."""
    library = Library([tmp_path])
    native = fun.with_fun(model, patch)
    built_once(order_of(NativeNetwork.of_model(native, "zimage"), "onnxruntime"), library)
    expected = own_sampling(native)
    patched = zimage.Patched(native, library, "onnxruntime")
    monkeypatch.setattr(native_weights, "has_memory_of_its_own", lambda _device: True)
    # behind a run that needed native the next one has its weights from the start
    for fails, loaded in ((False, False), (True, True), (False, True), (False, False)):
        model_management.unload_all_models()
        with monkeypatch.context() as failing:
            if fails:
                failing.setattr(FileSession, "_call", None)
            assert relative_error(patched.sample(*GIVEN, steps=STEPS), expected) <= LIMIT
        assert patched.counts == ((0, 2 * STEPS) if fails else (2 * STEPS, 0))
        assert any(one is patch for one in model_management.loaded_models()) is loaded


@pytest.mark.slow
def test_an_engine_for_any_weights_serves_other_files_of_both_networks_and_loras(
    environment: Any, model: ModelPatcher, patch: ModelPatcher, tmp_path: Path
) -> None:
    library, lora = Library([tmp_path]), lora_of(environment)
    net = NativeNetwork.of_model(fun.with_fun(model, patch), "zimage")
    built_once(replace(order_of(net, "onnxruntime"), replaceable=True), library)
    other, other_patch = fun.model(), fun.control(other=True, **TWO_ONE)
    for parameter in other.model.parameters():
        parameter.data *= 1.1
    latents = []
    for base, companion, strength in ((model, patch, 0.0), (model, other_patch, 0.0), (other, patch, 0.5),
                                      (other, other_patch, 0.8), (model, patch, 0.8)):  # fmt: skip
        native = fun.with_fun(comfy.sd.load_lora_for_models(base, None, lora, strength, 0)[0], companion)
        patched = zimage.Patched(native, library, "onnxruntime", any_weights=True)
        latents.append(own_sampling(native))
        assert relative_error(patched.sample(*GIVEN, steps=STEPS), latents[-1]) <= LIMIT
        assert patched.counts[1] == 0
    assert all(relative_error(a, b) > 100 * LIMIT for i, a in enumerate(latents) for b in latents[:i])


def test_nothing_keeps_a_model_or_a_patch_that_nobody_uses(tmp_path: Path) -> None:
    model, companion = fun.model(), fun.control(**TWO_ONE)
    patched = zimage.Patched(fun.with_fun(model, companion), Library([tmp_path]))
    patched.sample(*GIVEN, steps=STEPS)
    session, nets = weakref.ref(patched.handle.session), [weakref.ref(model.model), weakref.ref(companion.model)]
    patched = None
    gc.collect()
    assert session() is not None, "it stays open beside the two networks"
    model = None
    gc.collect()
    assert session() is None
    assert nets[0]() is None
    companion = None
    gc.collect()
    assert nets[1]() is None


def test_weights_of_two_networks_can_all_that_those_of_one_can() -> None:
    """Engines use the one in the place of the other."""
    kinds = (LiveWeights, JoinedWeights)
    of_one, of_two = ({name for name in vars(kind) if not name.startswith("_")} for kind in kinds)
    assert of_one <= of_two
