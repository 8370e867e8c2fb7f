"""Tiny Z-Image networks and their calls, in this process."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from comfy.ldm.lumina.model import NextDiT
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures import Role
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork
from small_networks import random_weights
from tiny_models import ZIMAGE

CPU = torch.device("cpu")
WIDTH = ZIMAGE["cap_feat_dim"]


def network(
    dtype: torch.dtype = torch.float32, operations: type = comfy.ops.disable_weight_init, **changes: Any
) -> NativeNetwork:
    """A random network inside a real ComfyUI patcher; computes in float32."""
    model = torch.nn.Module()
    module = NextDiT(**{**ZIMAGE, **changes}, device=CPU, dtype=dtype, operations=operations)
    random_weights(module, dtype)
    for name, parameter in module.named_parameters():
        if "norm" in name or name == "cap_embedder.0.weight":
            parameter.data += 1
        elif "pad_token" in name:
            parameter.data *= 16
    model.diffusion_model = module.eval().requires_grad_(False)
    return NativeNetwork(ModelPatcher(model, CPU, CPU), module, UNET_PREFIX, torch.float32, "zimage", Role.BACKBONE)


def call(height: int = 8, width: int = 8, batch: int = 1, tokens: int = 9, seed: int = 1) -> dict[str, Any]:
    """The arguments of a native call; latents' sizes, and the prompt's length."""
    generator = torch.Generator().manual_seed(seed)
    x, prompts = (torch.randn(shape, generator=generator) for shape in ((batch, 16, height, width),
                                                                        (batch, tokens, WIDTH)))
    timesteps = torch.rand(batch, generator=generator)
    return {"x": x, "timesteps": timesteps, "context": prompts, "num_tokens": tokens, "transformer_options": {}}
