"""The form in which a copy of a network has each weight: its dtype, and the tensors of quantised ones.

Most weights are in the dtype that the network computes in. Others stay as ComfyUI stores them, and are cast while they
are used, as its own layers do it: fp8 since it takes half the memory, wider ones since their layers compute in them.
Quantised weights (``comfy_quant``) are several tensors each, see ``architectures.quantised_linear``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..architectures.model_patches import WithCompanion

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

LARGE = 16 * 1024
"""Dynamic VRAM casts layers with more bytes than this when they are called; smaller layers keep their file's dtype."""

SERVED = ("TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout", "TensorWiseINT8Layout", "TensorCoreNVFP4Layout",
          "TensorCoreMXFP8Layout")  # fmt: skip
"""Formats that can be traced. The kernels of ConvRotW4A4 and AsymW4A8Int8 cannot, nor can kernels of packs (GGUF)."""


@functools.cache
def quantised_class() -> type:
    """ComfyUI's class of quantised weights."""
    from comfy.quant_ops import QuantizedTensor

    return QuantizedTensor


def is_quantised(weight: torch.Tensor | None) -> bool:
    """Tell whether a weight is of ComfyUI's class of quantised ones."""
    return isinstance(weight, quantised_class())


def is_fp8(dtype: torch.dtype) -> bool:
    """Tell whether it is one of torch's fp8 dtypes."""
    return dtype.is_floating_point and dtype.itemsize == 1


def tensors_of(leaf: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a copy's layer has in the place of a native weight, by their names there."""
    if not is_quantised(weight):
        return {leaf: weight}
    from ..architectures.quantised_linear import tensors_of

    return tensors_of(weight)


def class_of_copy(layer: torch.nn.Module) -> tuple[type | None, Mapping[str, Any]]:
    """Return the class of a quantised layer's copy, and the attributes that it has besides the layer's.

    ComfyUI makes the layer's own class anew for each model, so no other process can import it. None for other layers.
    A layer that could multiply in fp8 but does not is cast: its copy's weight may be in fp8 although its own is not.
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
    """Return why a layer with quantised weights is no part of an engine, in words, or None."""
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
    """The layers of a network that live weights alone can serve, in words; ``""`` without any."""
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
    """Yield a line for each weight that no copy has in the dtype it computes in; part of a network's structure."""
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
    """The dtype that a weight's layer was made with: dynamic VRAM keeps the file's dtype, and notes this one."""
    return getattr(layer, f"{leaf}_comfy_model_dtype", None) or layer._parameters[leaf].dtype


def _usual_dtype(module: torch.nn.Module) -> torch.dtype:
    """The dtype of most elements."""
    counted: Counter[torch.dtype] = Counter()
    for layer in module.modules():
        for leaf, weight in layer._parameters.items():
            if weight is not None:
                counted[_made_with(layer, leaf)] += weight.numel()
    return counted.most_common(1)[0][0] if counted else torch.float32


def weights_with_patches(patcher: ModelPatcher, prefix: str) -> dict[str, list]:
    """Return what ``ModelPatcher.get_key_patches`` does, without the patches that ComfyUI itself never applies.

    It also serves models with quantised layers, for which that method fails.
    """
    found = _quantised_with_patches(patcher, prefix) if has_quantised(patcher.model) else patcher.get_key_patches(
        prefix or None)  # fmt: skip
    dynamic = patcher.is_dynamic()
    for key in found.keys() & patcher.patches.keys():
        if _never_patched(patcher.model, key, dynamic):
            found[key] = found[key][:1]
    return found


def _never_patched(model: torch.nn.Module, key: str, dynamic: bool) -> bool:
    """Tell whether ComfyUI loads a weight as it is, whatever patches it has, as ``ModelPatcher.load`` does.

    It does so with weights that lie beside layers (``modulation`` of a block), and with buffers. With dynamic VRAM also
    with weights of layers that are not its own. Merged models have patches on all of them.
    """
    path, _, leaf = key.rpartition(".")
    layer = model.get_submodule(path)
    if leaf not in layer._parameters or dynamic and not hasattr(layer, "comfy_cast_weights"):
        return True
    return any(weight is not None for child in layer.children() for weight in child.parameters())


def _quantised_with_patches(patcher: ModelPatcher, prefix: str) -> dict[str, list]:
    found = {}
    for path, layer in patcher.model.named_modules():
        for leaf, weight in (*layer._parameters.items(), *layer._buffers.items()):
            key = f"{path}.{leaf}" if path else leaf
            if weight is None or not key.startswith(prefix) or leaf in layer._non_persistent_buffers_set:
                continue
            if key in patcher.backup:
                weight = patcher.backup[key].weight
            found[key] = [(weight, getattr(layer, f"convert_{leaf}", _as_it_is)), *patcher.patches.get(key, ())]
    return found


def _as_it_is(weight: torch.Tensor, **_: Any) -> torch.Tensor:
    return weight


def patched_when_called(patcher: ModelPatcher, path: str) -> bool:
    """Tell whether dynamic VRAM patches a layer's weight when it is called, and not when it loads it."""
    from comfy.model_management import module_size

    return patcher.is_dynamic() and module_size(patcher.model.get_submodule(path)) > LARGE


def rounded_when_called(patcher: ModelPatcher, key: str) -> bool:
    """Tell whether dynamic VRAM patches a weight in each call and always rounds it, to multiply in fp8."""
    path, _, leaf = key.rpartition(".")
    fast = leaf == "weight" and multiplies_in_fp8(patcher.model.get_submodule(path))
    return fast and patched_when_called(patcher, path)


def quantised_again(
    patcher: ModelPatcher, key: str, original: tuple, patches: list[tuple], device: torch.device, compute: torch.dtype
) -> torch.Tensor:
    """Return a quantised weight as the native layer has it: with its patches in, quantised again, to the bit.

    Where ComfyUI has loaded a model whole, a weight without patches stays as it is. Dynamic VRAM patches a large layer
    when it is called, in the dtype that it computes in, and rounds it with another seed. It quantises small ones again
    when it loads them, without patches too.
    """
    from comfy import model_management, utils
    from comfy.lora import calculate_weight

    weight, convert = original
    path = key.rpartition(".")[0]
    layer = patcher.model.get_submodule(path)
    called = patched_when_called(patcher, path)
    if not patches and (called or not patcher.is_dynamic()):
        return weight
    dtype, seed, more = model_management.lora_compute_dtype(device) if patches else None, key, {}
    if called:
        dtype, seed, more = compute, path, {"intermediate_dtype": compute}
    value = convert(model_management.cast_to_device(weight, device, dtype, copy=True), inplace=True)
    value = calculate_weight(patches, value, key, **more)
    return layer.set_weight(value, inplace_update=False, seed=utils.string_to_seed(seed), return_weight=True)
