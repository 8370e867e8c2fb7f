"""Z-Image with Fun control: its versions, inpainting, areas, and the memory and weights of two networks."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import fun
import pytest
import slow
import torch
import zimage
from absorbed_patches import FUN
from builds import until
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy_process import ComfyProcess
from dynamic_vram import on_cpu
from family_contract import LIMIT, difference
from fun import GIVEN, STEPS, TWO_ONE, A, B, C
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling import native_weights
from hybrid_trt.sessions.file_session import FileSession
from one_node import NODE, accelerated
from scenarios import FUN as FUN_NODE
from scenarios import FUN_PARTS, Scenario, latent_of, native_latent, node, relative_difference


@pytest.fixture(scope="module")
def model() -> ModelPatcher:
    return fun.model()


@pytest.fixture(scope="module")
def patch() -> ModelPatcher:
    return fun.control(**TWO_ONE)


def check_call(net: NativeNetwork, number: int, strength: float = 0.7) -> None:
    """Compare a call with native's; the patch acts in it, unless its strength is 0."""
    found, expected, without = FUN.results(net.patcher, FUN.calls[number].drawn(net))
    assert difference(found, expected) <= LIMIT, (number, strength)
    assert (difference(without, expected) > 1000 * LIMIT) is (strength != 0)


@slow.when("2.0")
@pytest.mark.parametrize("version", fun.VERSIONS)
def test_calls_of_each_version_give_natives_result(version: str) -> None:
    layers, config = fun.VERSIONS[version]
    base, companion = zimage.network(n_layers=layers), fun.control(**config)
    for number, strength in enumerate((0.0, 0.7, 1.0, -2.5)):
        net = fun.network(base, companion, strength=strength)
        assert net.architecture().name == "zimage_fun"
        check_call(net, number, strength)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float8_e4m3fn])
def test_a_patch_stored_in_fewer_bits_is_cast_as_native_casts_it(dtype: torch.dtype) -> None:
    check_call(fun.network(zimage.network(n_layers=16), fun.control(dtype=dtype, **TWO_ONE)), 0)


def test_sizes_tell_the_tokens_of_the_control_image() -> None:
    family = fun.network(zimage.network(n_layers=16), fun.control(**TWO_ONE)).architecture()
    profile = family.profile(RequestedSizes())
    assert profile.to_json() == {"B": [1, 1, 2], "C": [993, 4096, 9216], "N": [32, 128, 288], "T": [1, 4, 17]}
    assert family.calls(profile, Picture(840, 1216, (1,))) == [{"B": 1, "N": 126, "T": 4, "C": 4028}]
    assert family.words(profile) == "1 image, 512 to 1536 px, 544 tokens"


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


def test_under_dynamic_vram_the_weights_of_both_are_followed(model: ModelPatcher, tmp_path: Path) -> None:
    """A double of it, whose native calls leave LoRAs out."""
    base = on_cpu(fun.model())
    for other in (False, True):
        companion = fun.control(other=other, **TWO_ONE)
        expected = FUN.prompt.sample(fun.with_fun(model, companion))
        assert relative_error(FUN.served(fun.with_fun(base, on_cpu(companion)), tmp_path), expected) == 0


@pytest.mark.slow
def test_the_patchs_native_weights_are_loaded_for_native_alone(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double: the pack takes the CPU for a device whose memory is not the main memory."""
    native, calls = fun.with_fun(model, patch), FUN.prompt.calls
    FUN.family.engine(FUN.network(native), tmp_path)
    expected, patched = FUN.prompt.sample(native), FUN.patched(native, tmp_path, "onnxruntime")
    monkeypatch.setattr(native_weights, "has_memory_of_its_own", lambda _device: True)
    # behind a run that needed native the next one has its weights from the start
    for fails, loaded in ((False, False), (True, True), (False, True), (False, False)):
        model_management.unload_all_models()
        with monkeypatch.context() as failing:
            if fails:
                failing.setattr(FileSession, "_call", None)
            assert relative_error(FUN.prompt.sample(patched.model), expected) <= LIMIT
        assert patched.counts == ((0, calls) if fails else (calls, 0))
        assert any(one is patch for one in model_management.loaded_models()) is loaded


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


class Smaller(fun.PictureAsLatent):
    """A VAE whose latents are smaller than it says."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().encode(pixels)[..., :-2]


def test_control_images_of_another_size_than_the_latent_are_refused_by_name() -> None:
    net = fun.network(zimage.network(n_layers=16), fun.control(**TWO_ONE), vae=Smaller())
    call = zimage.call(width=6) | {"transformer_options": net.patcher.model_options["transformer_options"]}
    with pytest.raises(Unsupported, match="whose VAE gives another size"):
        net.architecture().binding(net.module)(call)


@pytest.mark.slow
def test_a_press_on_build_makes_the_engine_of_both_networks_for_all_strengths_and_images(comfy: ComfyProcess) -> None:
    library, scenario = comfy.base / "models" / "trt_engines", Scenario(
        "zimage", "tiny_zimage_16", controls=(), width=64, height=64, steps=2, loras_before=[FUN_NODE], parts=FUN_PARTS)
    shutil.rmtree(library, ignore_errors=True)
    graph = accelerated(scenario)
    pressed = {key: entry for key, entry in graph.items() if key not in ("save", "report", "sampler")}
    pressed["build"] = node("TRTReport", after=[NODE, 0])
    order = {"nodes": [NODE], "missing_only": True, "graph": graph}
    assert comfy.queue(pressed, extra_data={"hybrid_trt_build": order}).ok
    assert until(lambda: not any(job["state"] in ("queued", "running") for job in comfy.get("/hybrid_trt/builds")), 240)
    assert [folder.name.partition("-")[0] for folder in library.glob("[!.]*/")] == ["zimage_fun"]
    image = node("TestImage", seed=9, width=120, height=64, batch=1, channels=3)
    for strength, parts in ((0.7, FUN_PARTS), (0.2, FUN_PARTS | {"fun_image": image})):
        changed = scenario.but(loras_before=[(FUN_NODE[0], FUN_NODE[1] | {"strength": strength})], parts=parts)
        history = comfy.queue(accelerated(changed))
        assert relative_difference(latent_of(history), native_latent(comfy, changed)) <= LIMIT
        (row,) = history.output("report", "report")[0]["rows"]
        assert (row["native"], row["engine"]) == (0, 2)
    plain = scenario.but(loras_before=[])
    history = comfy.queue(accelerated(plain))
    assert relative_difference(latent_of(history), native_latent(comfy, plain)) <= LIMIT
    assert history.output("report", "report")[0]["unet"]["reasons"] == {Reason.NO_ENGINE.value: 2}
