"""ComfyUI's quantised layers: files say ``comfy_quant``, or ``scaled_fp8``, which becomes the same when it is loaded.

Such a layer lists keys in ``state_dict()`` that are no attributes of its own, so a patcher cannot tell its weights.
Plain fp8 weights are none: ComfyUI casts them as it does any other.
"""

from __future__ import annotations

import weakref

import torch

_known: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def has_quantised_layers(module: torch.nn.Module) -> bool:
    """Whether a weight of a loaded network is quantised; looked at once, since LoRAs leave it so."""
    if module not in _known:
        from comfy.quant_ops import QuantizedTensor

        _known[module] = any(isinstance(weight, QuantizedTensor) for weight in module.parameters())
    return _known[module]
