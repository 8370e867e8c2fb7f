"""Formats of weights: formats without engines, and the form in which a copy of a network has each weight.

No engine: weights of other packs. GGUF, bitsandbytes, Nunchaku and their like hand ComfyUI tensors of their own class,
or packed whole numbers that only their layers can read.

A copy has most weights in the dtype that the network computes in. The rest stay as ComfyUI stores them, and are cast
while they are used, as its own layers do it: fp8 since it takes half the memory, wider ones since their layers compute
in them. Quantised weights (``comfy_quant``) are several tensors each, see ``architectures.quantised_linear``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..architectures.model_patches import WithCompanion
from .changed_layers import answers_about
from .weight_patches import acting, version_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of weights that are plain numbers."""

LARGE = 16 * 1024
"""Dynamic VRAM casts layers with more bytes than this when they are called; smaller layers keep their file's dtype."""

SERVED = ("TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout", "TensorWiseINT8Layout", "TensorCoreNVFP4Layout",
          "TensorCoreMXFP8Layout")  # fmt: skip
"""Formats that can be traced. The kernels of ConvRotW4A4 and AsymW4A8Int8 cannot, nor can kernels of packs (GGUF)."""


@functools.cache
def _quantised_class() -> type:
    """Return ComfyUI's class of quantised weights."""
    from comfy.quant_ops import QuantizedTensor

    return QuantizedTensor


def is_quantised(weight: torch.Tensor | None) -> bool:
    """Tell whether a weight has ComfyUI's class of quantised weights."""
    return isinstance(weight, _quantised_class())


def is_fp8(dtype: torch.dtype) -> bool:
    """Tell whether it is one of torch's fp8 dtypes."""
    return dtype.is_floating_point and dtype.itemsize == 1


def tensors_of(leaf: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors in the place of a native weight in a copy: name there -> tensor."""
    if not is_quantised(weight):
        return {leaf: weight}
    from ..architectures.quantised_linear import tensors_of

    return tensors_of(weight)


def class_of_copy(layer: torch.nn.Module) -> tuple[type | None, Mapping[str, Any]]:
    """Return the class of a quantised layer's copy, or None for other layers, and the copy's additional attributes.

    ComfyUI makes the layer's own class anew for each model, so no other process can import it. A layer that could
    multiply in fp8 but does not is cast: its copy's weight may be in fp8 although its own is not.
    """
    from comfy import ops

    fast = getattr(ops, "fp8_ops", ops.manual_cast).Linear
    if not _of_a_quantised_model(type(layer)) and (type(layer) is not fast or multiplies_in_fp8(layer)):
        return None, {}
    weight = layer._parameters.get("weight")
    if not is_quantised(weight):
        return ops.manual_cast.Linear, {}
    from ..architectures.quantised_linear import QuantisedLinear

    names, context = weight.__tensor_flatten__()
    return QuantisedLinear, {"tensors": tuple(names), "context": context}


def why_no_engine(layer: torch.nn.Module) -> str | None:
    """Return why a layer's fp8 or quantised weights rule engines out, or None."""
    if multiplies_in_fp8(layer) and not is_fp8(_made_with(layer, "weight")):
        return "fp8 weights that ComfyUI widens and multiplies in fp8, for which no engine can be built yet"
    quantised = [leaf for leaf, weight in layer._parameters.items() if is_quantised(weight)]
    if not quantised:
        return None
    if not _of_a_quantised_model(type(layer)) or quantised != ["weight"]:
        return f"quantised layers of another kind ({type(layer).__name__}), for which no engine can be built yet"
    if (found := layer._parameters["weight"]._layout_cls) not in SERVED:
        return f"quantised layers in the format {found.removesuffix('Layout')}, for which no engine can be built yet"
    return None


def _of_a_quantised_model(kind: type) -> bool:
    own = kind.__qualname__.startswith("mixed_precision_ops.") and kind.__qualname__.endswith(".Linear")
    return own and kind.__module__ == "comfy.ops"


def has_quantised(module: torch.nn.Module) -> bool:
    """Tell whether a network has quantised weights."""
    return any(map(is_quantised, module.parameters()))


def multiplies_in_fp8(layer: torch.nn.Module) -> bool:
    """Tell whether a layer multiplies in fp8 with plain weights."""
    from ..architectures.quantised_linear import multiplies_in_fp8

    return multiplies_in_fp8(layer)


def layers_for_live_weights(module: torch.nn.Module) -> str:
    """Describe the layers of a network that only live weights can serve; ``""`` without any."""
    if has_quantised(module):
        return "quantised layers"
    return "layers that multiply in fp8 (fp8_e4m3fn_fast)" if any(map(multiplies_in_fp8, module.modules())) else ""


def stored_dtypes(module: torch.nn.Module, compute: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter in a copy that computes in ``compute``, by its name there."""
    if isinstance(module, WithCompanion):
        parts = {name: stored_dtypes(part, compute) for name, part in module.named_children()}
        return {f"{name}.{own}": dtype for name, part in parts.items() for own, dtype in part.items()}
    usual, found = _usual_dtype(module), {}
    for path, layer in module.named_modules():
        for leaf, weight in layer._parameters.items():
            if weight is None:
                continue
            for name, tensor in tensors_of(leaf, weight).items():
                whole = name != leaf or leaf not in ("weight", "bias") and _of_a_quantised_model(type(layer))
                whole |= leaf == "weight" and multiplies_in_fp8(layer)
                dtype = tensor.dtype if whole else _stored(layer, leaf, compute, usual)
                found[f"{path}.{name}" if path else name] = dtype
    return found


def kept_dtypes(module: torch.nn.Module) -> Iterator[str]:
    """Iterate over lines for the structure hash: weights whose dtype in a copy is not the compute dtype."""
    for name, dtype in stored_dtypes(module, torch.bfloat16).items():
        if dtype != torch.bfloat16:
            yield f"{name} kept in {dtype}"
    for path, layer in module.named_modules():
        if multiplies_in_fp8(layer):
            yield f"{path} multiplies in fp8"
        _, more = class_of_copy(layer)
        if not more:
            continue
        context, parts = more["context"], tensors_of("weight", layer._parameters["weight"])
        settings = sorted((k, v) for k, v in context["non_tensor_fields"].items() if k != "orig_dtype")
        shapes = sorted((name, tuple(part.shape)) for name, part in parts.items())
        yield f"{path} quantised {context['layout_cls']} {settings} {shapes}"


def _stored(layer: torch.nn.Module, leaf: str, compute: torch.dtype, usual: torch.dtype) -> torch.dtype:
    weight, dtype = layer._parameters[leaf], _made_with(layer, leaf)
    if is_fp8(dtype):
        large = leaf == "weight" and weight.ndim > 1 and weight.numel() > LARGE and hasattr(layer, "comfy_cast_weights")
        return dtype if large else compute
    if not dtype.is_floating_point:
        return weight.dtype
    return dtype if dtype.itemsize > max(compute.itemsize, usual.itemsize) else compute


def _made_with(layer: torch.nn.Module, leaf: str) -> torch.dtype:
    """Return the dtype that a weight's layer was made with: dynamic VRAM notes it, and keeps the file's dtype."""
    return getattr(layer, f"{leaf}_comfy_model_dtype", None) or layer._parameters[leaf].dtype


def _usual_dtype(module: torch.nn.Module) -> torch.dtype:
    """Return the dtype of most elements."""
    counted: Counter[torch.dtype] = Counter()
    for layer in module.modules():
        for leaf, weight in layer._parameters.items():
            if weight is not None:
                counted[_made_with(layer, leaf)] += weight.numel()
    return counted.most_common(1)[0][0] if counted else torch.float32


_NAMES: Mapping[str, str] = {
    "GGML": "GGUF", "GGUF": "GGUF", "Params4bit": "bitsandbytes", "Int8Params": "bitsandbytes", "bnb": "bitsandbytes",
    "SVDQ": "Nunchaku", "Nunchaku": "Nunchaku",
}  # fmt: skip
"""Part of the names of other packs' classes -> the usual name of such weights."""

_WEIGHTS = ("get_key_patches", "model_state_dict", "patch_weight_to_device")
"""Methods by which a patcher reads or patches weights."""


def unreadable_weights(module: torch.nn.Module, patcher: ModelPatcher) -> str | None:
    """Describe weights of a loaded network that cannot be read as plain numbers, or return None.

    The network is looked at once, since LoRAs do not change that.
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
            if type(weight) not in PLAIN:
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
    """Describe weights of another pack's class by their usual name, and say why there is no engine."""
    name = next((words for part, words in _NAMES.items() if part in kind.__name__), None)
    return f"{name} weights, and engines need plain ones" if name else f"weights of another pack ({kind.__qualname__})"


_kept: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
_patched: weakref.WeakKeyDictionary[torch.nn.Module, dict[object, bool]] = weakref.WeakKeyDictionary()
"""Answers about patches, by the question and the version of the weights."""


def cast_when_called(patcher: ModelPatcher) -> Mapping[str, torch.dtype]:
    """Return name -> fp8 dtype of weights that ComfyUI keeps in a wider dtype and casts before they compute."""
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
    return _any_patched(patcher, _is_kept_in_bytes)


def remark_on_rounding(patcher: ModelPatcher) -> str:
    """Return a remark on a model whose own pictures differ, since ComfyUI rounds its weights anew; mostly ``""``."""
    loads_in_part = patcher.is_dynamic() or getattr(patcher.model, "model_lowvram", False)
    if not (loads_in_part and _any_patched(patcher, _is_plain_fp8)):
        return ""
    return "Native rounds its fp8 weights with a LoRA otherwise from call to call; the engine has one of its values"


def _any_patched(patcher: ModelPatcher, question: Callable[[ModelPatcher, str], bool]) -> bool:
    """Tell whether the answer is yes for a weight with an acting patch. Cheap where these patches are known."""
    if (version := version_of(patcher)) is None:
        return False
    known, key = _patched.setdefault(patcher.model, {}), (question, version)
    if key not in known:
        if len(known) >= 64:
            known.clear()
        known[key] = any(question(patcher, name) for name, patches in patcher.patches.items() if acting(patches))
    return known[key]


def _is_kept_in_bytes(patcher: ModelPatcher, key: str) -> bool:
    weight = _parameter(patcher, key)[1]
    return weight is not None and (is_quantised(weight) or weight.dtype.itemsize == 1)


def _is_plain_fp8(patcher: ModelPatcher, key: str) -> bool:
    layer, weight = _parameter(patcher, key)
    if weight is None or is_quantised(weight) or multiplies_in_fp8(layer):
        return False
    return is_fp8(cast_when_called(patcher).get(key, weight.dtype))


def _parameter(patcher: ModelPatcher, key: str) -> tuple[torch.nn.Module, torch.Tensor | None]:
    """Return a weight of a patcher's model with its layer; None for a buffer."""
    path, _, leaf = key.rpartition(".")
    layer = patcher.model.get_submodule(path)
    return layer, layer._parameters.get(leaf)


def forget_casts(patcher: ModelPatcher) -> None:
    """Drop the cached facts about a model's weights, because some of its layers were replaced."""
    _kept.pop(patcher.model, None)
    _patched.pop(patcher.model, None)
