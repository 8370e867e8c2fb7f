"""Tiny Fun controls of Z-Image, in this process or in a server's: ComfyUI's loader makes them of one width only."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.model_patcher import CoreModelPatcher, ModelPatcher

CPU = torch.device("cpu")

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
                         device=CPU, **config)
    generator = torch.Generator().manual_seed(1 + other)
    for parameter in net.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
        parameter.data = (torch.randn(parameter.shape, generator=generator) / fan_in**0.5).to(dtype)
    return CoreModelPatcher(net.eval().requires_grad_(False), CPU, CPU)
