"""Native networks inside a ComfyUI patcher, without a file or a server: what the builder gets from a loader node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pack
import tiny_recipes
import torch

pack.import_comfy()

import comfy.model_patcher
import comfy.ops
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.comfy_model.network import UNET_PREFIX, NativeNetwork

CPU = torch.device("cpu")

PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(32, 64, 96), "W": Range(32, 64, 96), "T": Range(77, 77, 231),
                   "HB": Range(1, 1, 4)})
"""Batch 1 to 4, 256 to 768 px, 77 to 231 tokens."""

TINY = {"sd15": tiny_recipes.SD15, "sdxl": tiny_recipes.SDXL}
FULL_SD15 = tiny_recipes.SD15 | {
    "channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4, "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3}
FULL_SDXL = tiny_recipes.SDXL | {
    "channel_mult": [1, 2, 4], "num_res_blocks": [2] * 3, "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": 10, "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10]}
FULL = {"sd15": FULL_SD15, "sdxl": FULL_SDXL}
BLOCK = 1 << 24
"""Random numbers that the weights of a mapped network are cut from."""


def random_network(kind: str, config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 1,
                   device: torch.device = CPU) -> NativeNetwork:
    """A ``unet`` or ``controlnet`` of a layout with random weights that keep activations near one.

    Args:
        dtype: of the weights and of the computation.
        device: where ComfyUI is said to run it; the weights are on the CPU.
    """
    model, module = _module(kind, config, dtype, CPU)
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        scale = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
        p.data = (torch.randn(p.shape, generator=generator) * scale).to(dtype)
    for layer in module.modules():
        if isinstance(layer, torch.nn.GroupNorm | torch.nn.LayerNorm):
            layer.weight.data += 1
    return _patched(model, module, kind, dtype, device)


def mapped_network(
    kind: str, config: dict[str, Any], dtype: torch.dtype, file: Path, device: torch.device = CPU
) -> NativeNetwork:
    """As ``random_network``, with its weights in a file that is mapped: a full-size one takes no memory of its own."""
    model, module = _module(kind, config, dtype, torch.device("meta"))
    norms = {f"{n}.weight" for n, m in module.named_modules() if isinstance(m, torch.nn.GroupNorm | torch.nn.LayerNorm)}
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(1))
    offsets = {}
    with file.open("wb") as out:
        for number, (name, p) in enumerate(module.named_parameters()):
            scale = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
            start = 7919 * number % (BLOCK // 2)  # no two weights are alike
            values = block[start : start + p.numel()]
            values = values.repeat(-(-p.numel() // values.numel()))[: p.numel()] * scale + float(name in norms)
            offsets[name] = out.tell()
            out.write(memoryview(values.to(dtype).view(torch.uint8).numpy()))
    data = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    for name, p in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        values = data[offsets[name] : offsets[name] + p.numel() * dtype.itemsize].view(dtype).reshape(p.shape)
        module.get_submodule(owner)._parameters[last] = torch.nn.Parameter(values, requires_grad=False)
    return _patched(model, module, kind, dtype, device)


def _module(
    kind: str, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model as ComfyUI holds it and the network in it."""
    config = {k: list(v) if isinstance(v, list) else v for k, v in config.items()}
    config |= {"operations": comfy.ops.disable_weight_init, "dtype": dtype, "device": device}
    if kind == "unet":
        module = UNetModel(**config)
        model = torch.nn.Module()
        model.diffusion_model = module
    else:
        for name in ("out_channels", "transformer_depth_output"):
            del config[name]
        model = module = ControlNet(hint_channels=3, **config)
    return model, module


def _patched(
    model: torch.nn.Module, module: torch.nn.Module, kind: str, dtype: torch.dtype, device: torch.device
) -> NativeNetwork:
    module.eval().requires_grad_(False)
    patcher = comfy.model_patcher.ModelPatcher(model, device, CPU)
    return NativeNetwork(patcher, module, UNET_PREFIX if kind == "unet" else "", dtype, f"random {kind}", Role(kind))
