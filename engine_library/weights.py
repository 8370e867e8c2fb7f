"""The weights of a loaded model as the sampler would use them, and their hash.

Both read through ComfyUI's own patcher, so a LoRA applied before the engine node is part of the weights, and neither
the place nor the dtype in which ComfyUI happens to hold them matters.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

_hashes: weakref.WeakKeyDictionary[torch.nn.Module, dict[object, str]] = weakref.WeakKeyDictionary()


def current_weights(patcher: ModelPatcher, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each (name without prefix, tensor on the CPU) of the model's state, with the patcher's weight patches applied.

    Tensors keep the model's dtype, except quantised ones, which come dequantised. The model is left as it is: patched
    weights that ComfyUI currently has in place are read from its backup.
    """
    from comfy.lora import calculate_weight

    for key, (original, *patches) in patcher.get_key_patches(prefix or None).items():
        weight, convert = original
        if hasattr(weight, "dequantize") and type(weight) not in (torch.Tensor, torch.nn.Parameter):
            weight = weight.dequantize()
        weight = weight.detach().to("cpu")
        if patches:
            dtype = weight.dtype
            weight = convert(weight.to(torch.float32, copy=True), inplace=True)
            weight = calculate_weight(patches, weight, key).to(dtype)
        yield key[len(prefix) :], weight


def weights_hash(patcher: ModelPatcher, prefix: str = "") -> str:
    """sha256 over names, shapes and values of the weights.

    Values are hashed as float32, so a file that ComfyUI loads as float16 on a GPU and as float32 on a CPU has one hash.
    Computed once per loaded model and set of weight patches.
    """
    known = _hashes.setdefault(patcher.model, {})
    state = (patcher.patches_uuid if patcher.patches else None, prefix)
    if state not in known:
        known[state] = _hash(current_weights(patcher, prefix))
    return known[state]


def _hash(weights: Iterator[tuple[str, torch.Tensor]]) -> str:
    def digest(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        values = tensor.to(torch.float32).contiguous()
        h = hashlib.sha256(f"{name} {tuple(values.shape)} ".encode())
        h.update(memoryview(values.numpy()).cast("B") if values.numel() else b"")
        return h.digest()

    # hashing releases the GIL; the order of names, not of completion, makes the result
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        total = hashlib.sha256()
        for part in pool.map(digest, sorted(weights, key=lambda item: item[0])):
            total.update(part)
    return total.hexdigest()
