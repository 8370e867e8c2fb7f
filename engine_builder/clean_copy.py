"""A copy of a native module that is fit for export: on the CPU, in one dtype, free of ComfyUI's loading machinery."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch

from ..engine_library.native import NativeNetwork
from ..engine_library.weights import current_weights


def clean_copy(network: NativeNetwork, dtype: torch.dtype) -> torch.nn.Module:
    """Copy a network's module with its current weights (LoRAs applied) in ``dtype`` on the CPU.

    The native module stays untouched, whether its weights are on the GPU, staged by dynamic VRAM, partly offloaded by
    lowvram or kept in another dtype for casting: only its structure is walked, weights come through the patcher.
    """
    weights = dict(current_weights(network.patcher, network.prefix))
    return _copy(network.module, "", weights, dtype).eval().requires_grad_(False)


def _copy(
    module: torch.nn.Module, name: str, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.nn.Module:
    if "forward" in module.__dict__:
        raise ValueError(f"{name or type(module).__name__} has a replaced forward method, which an engine would lose")
    copy = module.__class__.__new__(module.__class__)
    torch.nn.Module.__init__(copy)
    machinery = set(copy.__dict__)
    copy.__dict__.update({k: v for k, v in module.__dict__.items() if k not in machinery})
    prefix = f"{name}." if name else ""
    copy._parameters = OrderedDict(
        (k, None if p is None else torch.nn.Parameter(weights[prefix + k].to(dtype, copy=True), requires_grad=False))
        for k, p in module._parameters.items()
    )
    copy._buffers = OrderedDict((k, None if b is None else b.detach().cpu()) for k, b in module._buffers.items())
    copy._modules = OrderedDict(
        (k, None if m is None else _copy(m, prefix + k, weights, dtype)) for k, m in module._modules.items()
    )
    if hasattr(module, "comfy_cast_weights"):
        # plain torch arithmetic: no casting, no streaming, no weight patches at call time
        copy.comfy_cast_weights = False
        copy.weight_function, copy.bias_function = [], []
    if isinstance(getattr(module, "dtype", None), torch.dtype):
        copy.dtype = dtype
    return copy
