"""Models behind tiny Fun controls, as ComfyUI's own nodes set them; in this process."""

from __future__ import annotations

from typing import Any

import comfy.sd
import torch
import zimage
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_model_patch import ZImageFunControlnet
from hybrid_trt.comfy_model.network import NativeNetwork
from tiny_fun import VERSIONS, PictureAsLatent, control
from tiny_transformers import let_comfyui_load_zimage

__all__ = ["GIVEN", "STEPS", "TWO_ONE", "VERSIONS", "A", "B", "C", "PictureAsLatent", "control", "model", "network",
           "picture", "with_fun"]  # fmt: skip

STEPS = 2
A, B, C = zimage.prompts(20, 31, 70)
GIVEN = [[A, {}]], [[B, {}]]
TWO_ONE = VERSIONS["2.1"][1]


def picture(seed: int = 2, height: int = 64, width: int = 48, images: int = 1) -> torch.Tensor:
    """A control image."""
    return torch.rand(images, height, width, 3, generator=torch.Generator().manual_seed(seed))


def with_fun(
    model: ModelPatcher, patch: ModelPatcher, image: torch.Tensor | None = None, strength: float = 0.7, **options: Any
) -> ModelPatcher:
    """The model behind ComfyUI's node for Fun control."""
    vae = options.pop("vae", None) or PictureAsLatent()
    image = picture() if image is None else image
    return ZImageFunControlnet().diffsynth_controlnet(model, patch, vae, image, strength, **options)[0]


def model(layers: int = 16, dtype: torch.dtype | None = None) -> ModelPatcher:
    """A MODEL with so many layers, as ComfyUI's loader makes it; ``dtype`` is what its weights are to be."""
    let_comfyui_load_zimage()
    return comfy.sd.load_diffusion_model_state_dict(
        zimage.network(n_layers=layers).module.state_dict(), model_options={} if dtype is None else {"dtype": dtype})


def network(base: NativeNetwork, patch: ModelPatcher, **options: Any) -> NativeNetwork:
    """The network of a model behind ComfyUI's node for Fun control, as an engine node sees it."""
    base.patcher.model.manual_cast_dtype, base.patcher.model.get_dtype = None, lambda: base.dtype
    return NativeNetwork.of_model(with_fun(base.patcher, patch, **options), "zimage")
