"""Tiny Fun controls of Z-Image, as ComfyUI's own nodes load and set them; in this process."""

from __future__ import annotations

from typing import Any

import comfy.ops
import comfy.sd
import torch
import zimage
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.model_patcher import CoreModelPatcher, ModelPatcher
from comfy_extras.nodes_model_patch import ZImageFunControlnet
from hybrid_trt.comfy_model.network import NativeNetwork
from small_networks import random_weights
from tiny_transformers import let_comfyui_load_zimage

#: Versions of Fun control: the layers that the model has to have for them, and what ComfyUI reads off their files.
VERSIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (16, {"n_control_layers": 2}),
    "2.1": (16, {"n_control_layers": 2, "refiner_control": True, "additional_in_dim": 17}),
    "2.0": (21, {"n_control_layers": 3, "refiner_control": True, "additional_in_dim": 17, "broken": True}),
}


class PictureAsLatent:
    """A VAE that ComfyUI's Fun node can ask.

    Attributes:
        encoded: the pictures that it encoded so far.
    """

    encoded = 0

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        self.encoded += 1
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        return small.repeat(1, 6, 1, 1)[:, :16]


def control(dtype: torch.dtype = torch.float32, other: bool = False, **config: Any) -> ModelPatcher:
    """A MODEL_PATCH with random weights; ``other`` ones are those of another file."""
    net = ZImage_Control(dim=256, n_heads=4, n_kv_heads=4, operations=comfy.ops.manual_cast, dtype=dtype,
                         device=zimage.CPU, **config)
    random_weights(net, dtype)
    if other:
        for parameter in net.parameters():
            parameter.data = parameter.data.flip(0)
    return CoreModelPatcher(net.eval().requires_grad_(False), zimage.CPU, zimage.CPU)


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


def model(layers: int = 16) -> ModelPatcher:
    """A MODEL with so many layers, as ComfyUI's loader makes it."""
    let_comfyui_load_zimage()
    return comfy.sd.load_diffusion_model_state_dict(zimage.network(n_layers=layers).module.state_dict())


def network(base: NativeNetwork, patch: ModelPatcher, **options: Any) -> NativeNetwork:
    """The network of a model behind ComfyUI's node for Fun control, as an engine node sees it."""
    base.patcher.model.manual_cast_dtype, base.patcher.model.get_dtype = None, lambda: base.dtype
    return NativeNetwork.of_model(with_fun(base.patcher, patch, **options), "zimage")
