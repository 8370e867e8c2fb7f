"""Z-Image with what changes its inside: each gives native's picture, on the engine or with a reason that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import comfy.utils
import pytest
import slow
import tiny_models
import torch
import zimage
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_model_patch import ZImageFunControlnet
from hybrid_trt.engine_library import Library, Reason
from hybrid_trt.engine_library.engine import relative_error
from small_networks import random_weights

LIMIT = 1e-5
STEPS = 4
A, B = zimage.prompts(20, 31)


@pytest.fixture
def patched(environment: Any, tmp_path: Path) -> zimage.Patched:
    (file,) = tiny_models.make(environment.base / "models", ["tiny_zimage"]).values()
    return zimage.Patched(zimage.load(file), Library([tmp_path]))


class PictureAsLatent:
    """A VAE that ComfyUI's Fun node can ask."""

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        return small.repeat(1, 6, 1, 1)[:, :16]


def with_fun(model: ModelPatcher, **config: Any) -> ModelPatcher:
    """The model behind ComfyUI's node for Fun control."""
    net = ZImage_Control(dim=256, n_heads=4, n_kv_heads=4, operations=comfy.ops.manual_cast, dtype=torch.float32,
                         device=zimage.CPU, **config)
    random_weights(net)
    patch = ModelPatcher(net.eval().requires_grad_(False), zimage.CPU, zimage.CPU)
    picture = torch.rand(1, 64, 48, 3, generator=torch.Generator().manual_seed(2))
    (found,) = ZImageFunControlnet().diffsynth_controlnet(model, patch, PictureAsLatent(), picture, 0.8)
    return found


def with_patch(name: str) -> Callable[[ModelPatcher], ModelPatcher]:
    """A node that sets a patch of its own in a place of the network."""

    def patch(given: dict) -> dict:
        return {"img": given["img"] * 1.1}

    def apply(model: ModelPatcher) -> ModelPatcher:
        model = model.clone()
        model.set_model_patch(patch, name)
        return model

    return apply


def _attention(function: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    found = function(*args, **kwargs)
    return found * torch.linspace(0.5, 1.5, found.shape[-1])


def with_attention(model: ModelPatcher) -> ModelPatcher:
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = _attention
    return model


def with_other_places(model: ModelPatcher) -> ModelPatcher:
    model = model.clone()
    model.set_model_rope_options(scale_x=1.3, shift_x=2.0, scale_y=0.8, shift_y=1.0, scale_t=1.0, shift_t=0.0)
    return model


REFUSED = {
    "Fun": (with_fun, "noise_refiner by ZImageControlPatch"),
    "Fun 2.1": (lambda model: with_fun(model, n_control_layers=15, refiner_control=True, additional_in_dim=17),
                "noise_refiner by ZImageControlPatch"),
    "noise refiner": (with_patch("noise_refiner"), "noise_refiner"),
    "double block": (with_patch("double_block"), "double_block"),
    "attention": (with_attention, "attention by"),
}  # fmt: skip


@pytest.mark.parametrize(("apply", "words"), slow.cases(REFUSED, ["Fun 2.1", "noise refiner"]))
def test_a_patch_inside_gives_natives_picture_and_a_reason(
    patched: zimage.Patched, apply: Callable[[ModelPatcher], ModelPatcher], words: str, caplog: Any
) -> None:
    given = [[A, {}]], [[B, {}]]
    plain, native = zimage.sample(patched.native, *given), zimage.sample(apply(patched.native), *given)
    assert relative_error(native, plain) > 100 * LIMIT
    own, patched.model = patched.model, apply(patched.model)
    assert relative_error(patched.sample(*given), native) <= LIMIT
    assert patched.counts == (0, 2 * STEPS)
    assert f"{Reason.MODEL_PATCHED.value}: {words}" in caplog.text
    patched.model = own
    assert relative_error(patched.sample(*given), plain) <= LIMIT
    assert patched.counts == (2 * STEPS, 0), "without it the engine serves again"


def test_references_give_natives_picture_and_a_reason(patched: zimage.Patched, caplog: Any) -> None:
    latent = torch.randn(1, 16, 6, 8, generator=torch.Generator().manual_seed(3))
    given = [[A, {"reference_latents": [latent]}]], [[B, {}]]
    native = zimage.sample(patched.native, *given)
    assert relative_error(native, zimage.sample(patched.native, [[A, {}]], given[1])) > 100 * LIMIT
    assert relative_error(patched.sample(*given), native) <= LIMIT
    assert patched.counts == (STEPS, STEPS)
    assert f"{Reason.UNSUPPORTED_INPUT.value}: reference latents" in caplog.text


def test_a_lora_of_the_prompts_layers_and_the_pictures_is_followed_from_run_to_run(
    environment: Any, patched: zimage.Patched
) -> None:
    (file,) = tiny_models.make(environment.base / "models", ["tiny_zimage_lora"]).values()
    lora = comfy.utils.load_torch_file(str(file))
    only_prompts = {name: tensor for name, tensor in lora.items() if "context_refiner" in name}
    assert 0 < len(only_prompts) < len(lora)
    given, plain = ([[A, {}]], [[B, {}]]), patched.model
    for weights, strength in ((lora, 0.8), (only_prompts, 0.8), (only_prompts, 0.0), (lora, 0.5)):
        native, _ = comfy.sd.load_lora_for_models(patched.native, None, weights, strength, 0)
        patched.model, _ = comfy.sd.load_lora_for_models(plain, None, weights, strength, 0)
        expected = zimage.sample(native, *given)
        assert (relative_error(zimage.sample(patched.native, *given), expected) > 100 * LIMIT) is (strength > 0)
        assert relative_error(patched.sample(*given), expected) <= LIMIT
        assert patched.counts == (2 * STEPS, 0)


def test_places_that_another_node_moves_are_served(patched: zimage.Patched) -> None:
    given = [[A, {}]], [[B, {}]]
    native = zimage.sample(with_other_places(patched.native), *given)
    assert relative_error(native, zimage.sample(patched.native, *given)) > 100 * LIMIT
    patched.model = with_other_places(patched.model)
    assert relative_error(patched.sample(*given), native) <= LIMIT
    assert patched.counts == (2 * STEPS, 0)


def test_masks_and_pooled_prompts_that_native_does_not_use_are_no_reason(patched: zimage.Patched) -> None:
    mask = torch.ones(1, 20)
    mask[:, 15:] = 0
    given = [[A, {"attention_mask": mask, "pooled_output": torch.ones(1, 8)}]], [[B, {}]]
    native = zimage.sample(patched.native, *given)
    assert relative_error(patched.sample(*given), native) <= LIMIT
    assert patched.counts == (2 * STEPS, 0)
