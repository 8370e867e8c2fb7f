"""A copy of a native module that is fit for export: on the CPU, in one dtype, free of ComfyUI's loading machinery."""

from __future__ import annotations

import torch

from ..engine_library.native import NativeNetwork
from ..engine_library.plain_copy import plain_copy
from ..engine_library.weights import current_weights


def clean_copy(network: NativeNetwork, dtype: torch.dtype) -> torch.nn.Module:
    """Copy a network's module with its current weights (LoRAs applied) in ``dtype`` on the CPU.

    The native module stays untouched, whether its weights are on the GPU, staged by dynamic VRAM, partly offloaded by
    lowvram or kept in another dtype for casting: only its structure is walked, weights come through the patcher.
    """
    weights = dict(current_weights(network.patcher, network.prefix))
    return plain_copy(
        network.module,
        dtype,
        parameter=lambda name, _: weights[name].to(dtype, copy=True),
        buffer=lambda _, tensor: tensor.detach().cpu(),
    )
