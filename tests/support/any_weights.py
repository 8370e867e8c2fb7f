"""Engines that take any weights, and what they and native compute with those of a model and its LoRAs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from built_once import built_once
from comfy.model_patcher import ModelPatcher
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.architectures.shapes import Profile, Range, sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from small_networks import CPU, native_call, network, random_weights

PROFILE = Profile({"B": Range(1, 2, 2), "H": Range(4, 8, 16), "W": Range(4, 8, 16), "T": Range(77, 77, 77),
                   "HB": Range(1, 1, 2)})
SIZES = {"B": 2, "H": 8, "W": 12, "T": 77, "HB": 1}
LIMIT = 1e-5
ORT = backends()["onnxruntime"]


def built(net: NativeNetwork, folder: Path, replaceable: bool = True, **options: Any) -> Engine:
    return built_once(BuildOrder(net, "float32", PROFILE, ORT, replaceable=replaceable, **options), Library([folder]))


def handle_of(
    net: NativeNetwork, folder: Path, replaceable: bool = False, backend: str = "onnxruntime"
) -> EngineHandle:
    choice = EngineChoice(PROFILE, backend=backend, replaceable=replaceable)
    # outside of a prompt all tests of a process would count for one node
    return EngineHandle.look_up(net, choice, Library([folder]), f"node of {folder}")


def another(net: NativeNetwork, layout: str = "unlike_levels") -> NativeNetwork:
    """A network of the same layout with other weights."""
    other = network("unet" if net.role is Role.BACKBONE else "controlnet", layout)
    random_weights(other.module)
    for parameter in other.module.parameters():
        parameter.data.neg_() if parameter.ndim > 1 else parameter.data.mul_(0.9)
    return other


def lora(net: NativeNetwork, seed: int, ends: str = "to_k.weight") -> dict[str, tuple]:
    """A difference for the weights of some name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: ("diff", (0.3 * torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5,))
        for name, p in net.patcher.model.named_parameters()
        if name.endswith(ends)
    }


def patched(net: NativeNetwork, *patches: tuple[dict[str, tuple], float]) -> ModelPatcher:
    patcher = net.patcher.clone()
    for values, strength in patches:
        assert patcher.add_patches(values, strength)
    return patcher


def inputs_of(net: NativeNetwork, sizes: dict[str, int] = SIZES) -> dict[str, torch.Tensor]:
    return sample_inputs(net.architecture().inputs(net.module, "float32"), sizes, seed=3)


def native(net: NativeNetwork, patcher: ModelPatcher, sizes: dict[str, int] = SIZES) -> list[torch.Tensor]:
    patcher.patch_model(CPU)
    try:
        return native_call(net, inputs_of(net, sizes))
    finally:
        patcher.unpatch_model(CPU)


def served(
    handle: EngineHandle, patcher: ModelPatcher | None = None, sizes: dict[str, int] = SIZES
) -> list[torch.Tensor]:
    with torch.inference_mode():
        done, result = handle.serve(None, lambda: EngineCall(inputs_of(handle.network, sizes), dict), patcher)
    assert done, handle.fallback or handle.stats.details
    return list(result.values())


def error(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(one, other, strict=True))
