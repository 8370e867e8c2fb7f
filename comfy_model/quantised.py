"""Weights that no engine can be built from: ComfyUI's quantised ones, and those that other packs keep in their own way.

ComfyUI's: files say ``comfy_quant``, or ``scaled_fp8``, which becomes the same when it is loaded. Plain fp8 weights are
none: ComfyUI casts them as it does any other. Other packs': GGUF, bitsandbytes, Nunchaku and their like hand ComfyUI
tensors of their own class, or packed whole numbers that only their layers can read. The ``state_dict()`` of such
layers may name what is no attribute of theirs, and a patcher cannot tell their weights.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMES: Mapping[str, str] = {
    "GGML": "GGUF", "GGUF": "GGUF", "Params4bit": "bitsandbytes", "Int8Params": "bitsandbytes", "bnb": "bitsandbytes",
    "SVDQ": "Nunchaku", "Nunchaku": "Nunchaku",
}  # fmt: skip
"""Part of the names of other packs' classes -> the usual name of such weights."""

_WEIGHTS = ("get_key_patches", "model_state_dict", "patch_weight_to_device")
"""Methods of a patcher that say what its weights are."""

_known: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


def unreadable_weights(module: torch.nn.Module, patcher: ModelPatcher) -> str | None:
    """Return which weights of a loaded network cannot be read as plain numbers, in words, or None.

    The network is looked at once, since LoRAs leave it so.
    """
    if module not in _known:
        _known[module] = _unreadable(module) or ""
    return _known[module] or _patched_otherwise(type(patcher))


def _unreadable(module: torch.nn.Module) -> str | None:
    from comfy.quant_ops import QuantizedTensor

    for layer in module.modules():
        for weight in itertools.chain(layer._parameters.values(), layer._buffers.values()):
            if isinstance(weight, QuantizedTensor):
                return "quantised layers, for which no engine can be built yet"
            if weight is None:
                continue
            if type(weight) not in _PLAIN:
                return _weights_of(type(weight))
            if weight.ndim > 1 and not weight.is_floating_point():  # packed: a plain layer has none
                return _weights_of(type(layer))
    return None


@functools.cache
def _patched_otherwise(kind: type[ModelPatcher]) -> str | None:
    for name in _WEIGHTS:
        owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
        if owner.__module__.split(".")[0] != "comfy":
            return _weights_of(owner)
    return None


def _weights_of(kind: type) -> str:
    """The usual name of weights of another pack's class, and the reason why there is no engine."""
    name = next((words for part, words in _NAMES.items() if part in kind.__name__), None)
    return f"{name} weights, and engines need plain ones" if name else f"weights of another pack ({kind.__qualname__})"
