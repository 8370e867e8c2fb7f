"""Native networks inside a ComfyUI patcher, without a file or a server: what the builder gets from a loader node."""

from __future__ import annotations

from typing import Any

import pack
import tiny_models
import torch

pack.import_comfy()

import comfy.model_patcher  # noqa: E402
import comfy.ops  # noqa: E402
from comfy.cldm.cldm import ControlNet  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from hybrid_trt.architectures.tensors import Profile, Range  # noqa: E402
from hybrid_trt.engine_library.native import UNET_PREFIX, NativeNetwork  # noqa: E402

CPU = torch.device("cpu")

PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(32, 64, 96), "W": Range(32, 64, 96), "T": Range(77, 77, 231),
                   "HB": Range(1, 1, 4)})
"""Batch 1 to 4, 256 to 768 px, 77 to 231 tokens."""

TINY = {"sd15": tiny_models.SD15, "sdxl": tiny_models.SDXL}
FULL_SD15 = tiny_models.SD15 | {
    "channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4, "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3}


def random_network(kind: str, config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 1,
                   device: torch.device = CPU) -> NativeNetwork:
    """A ``unet`` or ``controlnet`` of a layout with random weights that keep activations near one.

    Args:
        dtype: of the weights and of the computation.
        device: where ComfyUI is said to run it; the weights are on the CPU.
    """
    config = {k: list(v) if isinstance(v, list) else v for k, v in config.items()}
    config |= {"operations": comfy.ops.disable_weight_init, "dtype": dtype, "device": CPU}
    if kind == "unet":
        module = UNetModel(**config)
        model = torch.nn.Module()
        model.diffusion_model = module
    else:
        for name in ("out_channels", "transformer_depth_output"):
            del config[name]
        model = module = ControlNet(hint_channels=3, **config)
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        scale = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
        p.data = (torch.randn(p.shape, generator=generator) * scale).to(dtype)
    for layer in module.modules():
        if isinstance(layer, torch.nn.GroupNorm | torch.nn.LayerNorm):
            layer.weight.data += 1
    module.eval().requires_grad_(False)
    patcher = comfy.model_patcher.ModelPatcher(model, device, CPU)
    return NativeNetwork(patcher, module, UNET_PREFIX if kind == "unet" else "", dtype, f"random {kind}")
