"""Z-Image with Fun control: native computes what an engine does not, and a reason names it; the view of the page."""

from __future__ import annotations

import copy
import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fun
import pytest
import slow
import torch
import zimage
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph import DynamicPrompt
from comfy_process import ComfyProcess
from fun_sampling import GIVEN, STEPS, TWO_ONE, call_of, model, own_sampling, patch
from hybrid_trt.architectures.calls import Unsupported
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.page_api.workflow_graph import model_name, node_key
from one_node import NODE, accelerated
from scenarios import FUN, FUN_PARTS, Scenario, latent_of, native_latent, node, relative_difference

__all__ = ["model", "patch"]  # fixtures: pytest finds them by name

LIMIT = 1e-5


def _beside(given: dict) -> dict:
    return {"img": given["img"] * 1.1}


def with_another_patch(native: ModelPatcher, _patch: ModelPatcher) -> ModelPatcher:
    native = native.clone()
    native.set_model_double_block_patch(_beside)
    return native


def without_patches(native: ModelPatcher, _patch: ModelPatcher) -> ModelPatcher:
    native = native.clone()
    native.model_options["transformer_options"].pop("patches")
    return native


def with_other_file(native: ModelPatcher, patch: ModelPatcher) -> ModelPatcher:
    return fun.with_fun(without_patches(native, patch), fun.control(other=True, **TWO_ONE))


def with_two(native: ModelPatcher, patch: ModelPatcher) -> ModelPatcher:
    return fun.with_fun(native, patch, fun.picture(7), 0.4)


BEHIND = {
    "another patch beside it": (with_another_patch, Reason.MODEL_PATCHED, "noise_refiner by ZImageControlPatch"),
    "two at once": (with_two, Reason.MODEL_PATCHED, "noise_refiner by ZImageControlPatch"),
    "none": (without_patches, Reason.OTHER_MODEL, "the model that is sampled has none"),
    "another file": (with_other_file, Reason.OTHER_MODEL, "the model that is sampled has that of another file"),
}


@pytest.mark.parametrize(("change", "reason", "words"), slow.cases(BEHIND, set(BEHIND) - {"another patch beside it"}))
@pytest.mark.fault("a model is sampled with other patches than its engine computes",
                   see="normal speed: *model patched* or *engine of another model*")
def test_a_model_with_other_patches_than_at_the_engine_gives_natives_picture_and_a_reason(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, caplog: Any,
    change: Callable[[ModelPatcher, ModelPatcher], ModelPatcher], reason: Reason, words: str,
) -> None:  # fmt: skip
    patched = zimage.Patched(fun.with_fun(model, patch), Library([tmp_path]))
    own, native = patched.model, change(patched.native, patch)
    patched.model = change(own, patch)
    assert relative_error(patched.sample(*GIVEN, steps=STEPS), own_sampling(native)) <= LIMIT
    assert patched.counts == (0, 2 * STEPS)
    assert f"{reason.value}: " in caplog.text
    assert words in caplog.text
    patched.model = own
    assert relative_error(patched.sample(*GIVEN, steps=STEPS), own_sampling(patched.native)) <= LIMIT
    assert patched.counts == (2 * STEPS, 0), "with its own patch the engine serves again"


def test_several_control_images_at_once_give_natives_picture_and_a_reason(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, caplog: Any
) -> None:
    patched = zimage.Patched(fun.with_fun(model, patch, fun.picture(images=2)), Library([tmp_path]))
    sizes = {"batch": 2, "cfg": 1.0}
    assert relative_error(patched.sample(*GIVEN, steps=STEPS, **sizes), own_sampling(patched.native, **sizes)) <= LIMIT
    assert patched.counts == (0, STEPS)
    assert f"{Reason.UNSUPPORTED_INPUT.value}: Fun control with 2 images at once" in caplog.text


class Smaller(fun.PictureAsLatent):
    """A VAE whose latents are smaller than it says."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().encode(pixels)[..., :-2]


def test_control_images_that_no_engine_takes_are_refused_by_name() -> None:
    base, patch = zimage.network(n_layers=16), fun.control(**TWO_ONE)
    refused = {"encodes its image to another size": fun.network(base, patch, vae=Smaller()),
               "there is no Fun control": fun.network(base, patch)}
    for words, net in refused.items():
        given = call_of(net, width=6) if "size" in words else zimage.call(width=6)
        with pytest.raises(Unsupported, match=words):
            net.architecture().binding(net.module)(given)


def test_a_patch_behind_the_engine_node_is_named_with_what_to_do(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, caplog: Any
) -> None:
    patched = zimage.Patched(model, Library([tmp_path]))
    patched.model = fun.with_fun(patched.model, patch)
    assert relative_error(patched.sample(*GIVEN, steps=STEPS), own_sampling(fun.with_fun(model, patch))) <= LIMIT
    assert patched.counts == (0, 2 * STEPS)
    assert "put the engine node behind ZImageFunControlnet" in caplog.text


def replacement_of(own: Callable) -> Callable:
    """Another pack's function in the place of a method of ComfyUI's, which looks like that."""

    @functools.wraps(own)
    def replacement(self: Any, *given: Any, **options: Any) -> Any:
        found = own(self, *given, **options)
        if isinstance(found, dict):
            return {**found, "img": given[0]["img_input"] * 0.9} if "img_input" in found else found
        parts = found if isinstance(found, tuple) else (found,)
        more = tuple(part if part is None else part * 1.1 for part in parts)
        return more if isinstance(found, tuple) else more[0]

    return replacement


def test_patches_that_no_engine_computes_leave_the_model_its_own_engine(model: ModelPatcher) -> None:
    too_many = fun.control(n_control_layers=3, refiner_control=True, additional_in_dim=17)

    class Other(type(fun.with_fun(model, too_many).model_options["transformer_options"]["patches"]["double_block"][0])):
        """Another pack's patch that inherits from ComfyUI's."""

    given, elsewhere = fun.with_fun(model, fun.control(**TWO_ONE)), fun.control(**TWO_ONE)
    for patches in given.model_options["transformer_options"]["patches"].values():
        patches[0].__class__ = Other
    elsewhere.load_device = torch.device("cpu", 1)
    others = (too_many, fun.control(n_control_layers=1), elsewhere)
    for native in (given, *(fun.with_fun(model, other) for other in others)):
        assert NativeNetwork.of_model(native, "zimage").architecture().name == "zimage"


@pytest.mark.parametrize("name", ["forward_control_block", "forward_noise_refiner_block", "forward", "__call__"])
def test_code_of_another_pack_in_the_patch_is_natives(
    model: ModelPatcher, patch: ModelPatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    native = fun.with_fun(model, patch)
    patched = zimage.Patched(native, Library([tmp_path]))
    before = patched.sample(*GIVEN, steps=STEPS)
    one = native.model_options["transformer_options"]["patches"]["double_block"][0]
    kind = type(one) if name == "__call__" else type(patch.model)
    monkeypatch.setattr(kind, name, replacement_of(getattr(kind, name)))
    expected = own_sampling(native)
    assert relative_error(before, expected) > 100 * LIMIT
    assert relative_error(patched.sample(*GIVEN, steps=STEPS), expected) <= LIMIT
    assert patched.counts[0] == 0
    assert list(patched.handle.stats.reasons) == [Reason.MODEL_PATCHED.value]


GRAPH: dict[str, Any] = {
    "unet": {"class_type": "UNETLoader", "inputs": {"unet_name": "model"}},
    "lora": {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["unet", 0], "lora_name": "lora"}},
    "file": {"class_type": "ModelPatchLoader", "inputs": {"name": "fun"}},
    "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "vae"}},
    "image": {"class_type": "LoadImage", "inputs": {"image": "one"}},
    "fun": {"class_type": "ZImageFunControlnet", "inputs": {
        "model": ["lora", 0], "model_patch": ["file", 0], "vae": ["vae", 0], "image": ["image", 0], "strength": 0.7}},
    "engine": {"class_type": "TRTUNetEngine", "inputs": {"model": ["fun", 0], "backend": "torch"}},
}


@pytest.mark.parametrize(("node", "value", "same"), [
    ("fun", {"strength": 0.2}, True), ("image", {"image": "two"}, True), ("vae", {"vae_name": "other"}, True),
    ("file", {"name": "other"}, False), ("lora", {"lora_name": "other"}, False), ("engine", {"backend": "auto"}, False),
], ids=["strength", "image", "VAE", "file of the patch", "LoRA", "backend"])  # fmt: skip
def test_a_node_on_the_page_is_the_same_for_all_images_and_strengths(node: str, value: dict, same: bool) -> None:
    other = copy.deepcopy(GRAPH)
    other[node]["inputs"] |= value
    assert (node_key(other, "engine") == node_key(GRAPH, "engine")) is same


@pytest.mark.slow
def test_a_press_on_build_makes_the_engine_of_both_networks_for_all_strengths_and_images(comfy: ComfyProcess) -> None:
    library, scenario = comfy.base / "models" / "trt_engines", Scenario(
        "zimage", "tiny_zimage_16", controls=(), width=64, height=64, steps=2, loras_before=[FUN], parts=FUN_PARTS)
    shutil.rmtree(library, ignore_errors=True)
    graph = accelerated(scenario)
    pressed = {key: entry for key, entry in graph.items() if key not in ("save", "report", "sampler")}
    pressed["build"] = node("TRTReport", after=[NODE, 0])
    order = {"nodes": [NODE], "missing_only": True, "graph": graph}
    assert comfy.queue(pressed, extra_data={"hybrid_trt_build": order}).ok
    assert wait_until(lambda: not any(job["state"] in ("queued", "running") for job in comfy.get("/hybrid_trt/builds")))
    assert [folder.name.partition("-")[0] for folder in library.glob("[!.]*/")] == ["zimage_fun"]
    image = node("TestImage", seed=9, width=120, height=64, batch=1, channels=3)
    for strength, parts in ((0.7, FUN_PARTS), (0.2, FUN_PARTS | {"fun_image": image})):
        changed = scenario.but(loras_before=[(FUN[0], FUN[1] | {"strength": strength})], parts=parts)
        history = comfy.queue(accelerated(changed))
        assert relative_difference(latent_of(history), native_latent(comfy, changed)) <= LIMIT
        (row,) = history.output("report", "report")[0]["rows"]
        assert (row["native"], row["engine"]) == (0, 2)
    plain = scenario.but(loras_before=[])
    history = comfy.queue(accelerated(plain))
    assert relative_difference(latent_of(history), native_latent(comfy, plain)) <= LIMIT
    assert history.output("report", "report")[0]["unet"]["reasons"] == {Reason.NO_ENGINE.value: 2}


def wait_until(happened: Callable[[], bool], seconds: float = 240) -> bool:
    """Wait for something; False where it did not happen in time."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_an_engine_is_called_by_the_models_file_and_not_by_that_of_its_vae() -> None:
    assert model_name(DynamicPrompt(GRAPH), "engine", "model", "") == "model"
