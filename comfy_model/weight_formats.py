"""Formats of weights that need care: formats without engines, fp8, and ComfyUI's quantised formats.

No engine: weights of other packs. GGUF, bitsandbytes, Nunchaku and their like hand ComfyUI tensors of their own class,
or packed whole numbers that only their layers can read.

Plain fp8 weights are cast by ComfyUI; quantised ones (``comfy_quant``, or ``scaled_fp8``, which becomes the same when
it is loaded) are multiplied as they are where the GPU can. Their values depend on the way in which the model is loaded:

* *Loaded whole*, patched ones are rounded up or down at random, with a seed from their name. Engines have these values.
* *Loaded in part*, weights off the device are patched in each call, and not rounded. Engines have the
  values of the model loaded whole.
* *Dynamic VRAM* keeps a file's weights as they are and casts large layers when they are called. The first call
  of a patched layer has the unrounded weight. Later calls have it rounded by another seed, while there is room for it.
  Engines have the value of the model loaded whole, about as far from both as these are from each other. Weights that
  are multiplied as they are always have the rounded value, and so have engines.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from .changed_layers import answers_about
from .stored_weights import LARGE, is_fp8, is_quantised, multiplies_in_fp8, why_no_engine
from .weight_patches import acting, version_of

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


def unreadable_weights(module: torch.nn.Module, patcher: ModelPatcher) -> str | None:
    """Return which weights of a loaded network cannot be read as plain numbers, in words, or None.

    The network is looked at once, since LoRAs leave it so.
    """
    known = answers_about(module)
    if "unreadable" not in known:
        known["unreadable"] = _unreadable(module)
    return known["unreadable"] or _patched_otherwise(type(patcher))


def _unreadable(module: torch.nn.Module) -> str | None:
    for layer in module.modules():
        if (why := why_no_engine(layer)) is not None:
            return why
        for weight in itertools.chain(layer._parameters.values(), layer._buffers.values()):
            if weight is None or is_quantised(weight):
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


_kept: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
_patched: weakref.WeakKeyDictionary[torch.nn.Module, dict[object, bool]] = weakref.WeakKeyDictionary()
"""Answers about patches, by version of the weights."""


def cast_when_called(patcher: ModelPatcher) -> Mapping[str, torch.dtype]:
    """Name -> fp8 dtype of the weights that ComfyUI has in a wider one, and casts to it before they compute."""
    if not patcher.is_dynamic():
        return {}
    model = patcher.model
    if model not in _kept:
        _kept[model] = {
            f"{path}.{leaf}" if path else leaf: dtype
            for path, layer in model.named_modules()
            for leaf in layer._parameters
            if (dtype := _cast_to(layer, leaf)) is not None
        }
    return _kept[model]


def _cast_to(layer: torch.nn.Module, leaf: str) -> torch.dtype | None:
    dtype = getattr(layer, f"{leaf}_comfy_model_dtype", None)
    if layer._parameters[leaf] is None or dtype is None or not is_fp8(dtype):
        return None
    if not hasattr(layer, "comfy_cast_weights"):
        return dtype
    from comfy.model_management import module_size

    return dtype if leaf in ("weight", "bias") and module_size(layer) > LARGE else None


def patches_rounded(patcher: ModelPatcher) -> bool:
    """Tell whether a patch acts on a weight that ComfyUI keeps in fp8 or quantised."""
    if (version := version_of(patcher)) is None:
        return False
    known = _patched.setdefault(patcher.model, {})
    if version not in known:
        if len(known) >= 64:
            known.clear()
        dtypes = {n: torch.int8 if is_quantised(p) else p.dtype for n, p in patcher.model.named_parameters()}
        known[version] = any(
            dtypes.get(key, torch.float32).itemsize == 1 and acting(patches) for key, patches in patcher.patches.items()
        )
    return known[version]


def remark_on_rounding(patcher: ModelPatcher) -> str:
    """Return a remark on a model whose own pictures differ, since ComfyUI rounds its weights anew; mostly ``""``."""
    if (version := version_of(patcher)) is None:
        return ""
    if not (patcher.is_dynamic() or getattr(patcher.model, "model_lowvram", False)):
        return ""
    known = _patched.setdefault(patcher.model, {})
    if ("plain", version) not in known:
        known["plain", version] = any(_is_plain_fp8(patcher, key) for key, patches in patcher.patches.items()
                                      if acting(patches))  # fmt: skip
    if not known["plain", version]:
        return ""
    return "Native rounds its fp8 weights with a LoRA otherwise from call to call; the engine has one of its values"


def _is_plain_fp8(patcher: ModelPatcher, key: str) -> bool:
    path, _, leaf = key.rpartition(".")
    layer = patcher.model.get_submodule(path)
    weight = layer._parameters.get(leaf)
    if weight is None or is_quantised(weight) or multiplies_in_fp8(layer):
        return False
    return is_fp8(cast_when_called(patcher).get(key, weight.dtype))


def forget_casts(patcher: ModelPatcher) -> None:
    """Forget the cached facts about a model's weights: some of its layers were replaced."""
    _kept.pop(patcher.model, None)
    _patched.pop(patcher.model, None)
