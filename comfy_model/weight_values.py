"""Values of a model's weights as the sampler would use them, read through ComfyUI's own patcher.

So a LoRA before the engine node is part of them, and neither the place nor the dtype in which ComfyUI holds them
matters.

ComfyUI casts plain fp8 weights. Quantised weights (``comfy_quant``; ``scaled_fp8`` becomes that when it is loaded) are
multiplied without a cast where the GPU can. With a LoRA, the values of both depend on how the model is loaded:

* *Loaded whole*: patched weights are rounded up or down at random, with a seed from their name. Engines have these
  values.
* *Loaded in part*: weights off the device are patched in each call, and not rounded. Engines have the values of the
  model loaded whole.
* *Dynamic VRAM* keeps a file's weights and casts large layers when they are called. The first call of a patched layer
  has the unrounded weight. Later calls have it rounded by another seed, while there is room for it. Engines have the
  value of the model loaded whole, which is about as far from both values as these are from each other. Weights that are
  multiplied without a cast always have the rounded value, and so have engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .weight_formats import LARGE, PLAIN, cast_when_called, has_quantised, is_fp8, is_quantised, multiplies_in_fp8
from .weight_patches import acting

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class PatchedWeight(NamedTuple):
    """A weight of a patcher's model with the patches on it.

    Attributes:
        key: its name in the model.
        stored: the weight without patches, as ComfyUI keeps it.
        convert: makes the tensor that patches are applied to.
        patches: the acting patches, see ``acting``.
        cast: the dtype that ComfyUI casts it to before it computes, or None, see ``cast_when_called``.
    """

    patcher: ModelPatcher
    key: str
    stored: torch.Tensor
    convert: Callable[..., torch.Tensor]
    patches: list[tuple]
    cast: torch.dtype | None


def patched_weights(patcher: ModelPatcher, prefix: str = "") -> Iterator[PatchedWeight]:
    """Iterate over the weights of a network in a patcher's model; no weight is kept after its turn."""
    found, cast = _with_patches(patcher, prefix), cast_when_called(patcher)
    for key in list(found):
        (stored, convert), *patches = found.pop(key)
        yield PatchedWeight(patcher, key, stored, convert, acting(patches), cast.get(key))


def current_weights(
    patcher: ModelPatcher, prefix: str = "", wanted: Callable[[torch.Tensor], bool] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name without prefix, tensor on the CPU) of the model's weights, with the patcher's patches applied.

    Tensors keep the model's dtype, except quantised ones, which come dequantised. The model is left as it is: patched
    weights that ComfyUI currently has in place are read from its backup.

    Args:
        wanted: which weights; all by default.
    """
    for weight in patched_weights(patcher, prefix):
        if wanted is not None and not wanted(weight.stored):
            continue
        dtype, device = weight.stored.dtype, torch.device("cpu")
        if is_quantised(weight.stored) or is_fp8(weight.cast or dtype):
            device = torch.device(patcher.load_device)  # each device draws other numbers to round with
        if is_quantised(weight.stored) and weight.patches:
            value = plain(quantised_again(weight, device, dtype))
        else:
            value = value_of(weight, device)
        yield weight.key[len(prefix) :], value.cpu()


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as ComfyUI keeps it, dequantised."""
    return (weight if type(weight) in PLAIN else weight.dequantize()).detach()


def value_of(weight: PatchedWeight, device: torch.device, called: bool = False) -> torch.Tensor:
    """Return a weight as the sampler would use it: computed on ``device`` if it is patched, else where it is.

    A patched weight is rounded to the dtype that ComfyUI keeps it in, as where a model is loaded whole. fp8 is computed
    as in ComfyUI, on the same device: a wider dtype or another device's random numbers round otherwise.

    Args:
        called: whether dynamic VRAM always rounds it, see ``rounded_when_called``.
    """
    value = plain(weight.stored)
    if weight.cast is not None:
        value = value.to(weight.cast)
    if not weight.patches:
        return value
    from comfy import model_management, utils
    from comfy.float import stochastic_rounding
    from comfy.lora import calculate_weight

    kept, key = value.dtype, weight.key
    dtype = model_management.lora_compute_dtype(device) if is_fp8(kept) else torch.float32
    seed, more = (key.rpartition(".")[0], {"intermediate_dtype": dtype}) if called else (key, {})
    value = weight.convert(model_management.cast_to_device(value, device, dtype, copy=True), inplace=True)
    value = calculate_weight(weight.patches, value, key, **more)
    return stochastic_rounding(value, kept, seed=utils.string_to_seed(seed))


def rounded_when_called(patcher: ModelPatcher, key: str) -> bool:
    """Tell whether dynamic VRAM patches a weight in each call and always rounds it, to multiply in fp8."""
    path, _, leaf = key.rpartition(".")
    fast = leaf == "weight" and multiplies_in_fp8(patcher.model.get_submodule(path))
    return fast and _patched_when_called(patcher, path)


def _patched_when_called(patcher: ModelPatcher, path: str) -> bool:
    """Tell whether dynamic VRAM patches a layer's weight when it is called, and not when it loads it."""
    from comfy.model_management import module_size

    return patcher.is_dynamic() and module_size(patcher.model.get_submodule(path)) > LARGE


def quantised_again(weight: PatchedWeight, device: torch.device, compute: torch.dtype) -> torch.Tensor:
    """Return a quantised weight as the native layer has it: with its patches in, quantised again, to the bit.

    Where ComfyUI has loaded a model whole, a weight without patches stays as it is. Dynamic VRAM patches a large layer
    when it is called, in the dtype that it computes in, and rounds it with another seed. It quantises small ones again
    when it loads them, without patches too.
    """
    from comfy import model_management, utils
    from comfy.lora import calculate_weight

    patcher, key = weight.patcher, weight.key
    path = key.rpartition(".")[0]
    called = _patched_when_called(patcher, path)
    if not weight.patches and (called or not patcher.is_dynamic()):
        return weight.stored
    dtype, seed, more = model_management.lora_compute_dtype(device) if weight.patches else None, key, {}
    if called:
        dtype, seed, more = compute, path, {"intermediate_dtype": compute}
    value = weight.convert(model_management.cast_to_device(weight.stored, device, dtype, copy=True), inplace=True)
    value = calculate_weight(weight.patches, value, key, **more)
    layer = patcher.model.get_submodule(path)
    return layer.set_weight(value, inplace_update=False, seed=utils.string_to_seed(seed), return_weight=True)


def _with_patches(patcher: ModelPatcher, prefix: str) -> dict[str, list]:
    """Return what ``ModelPatcher.get_key_patches`` does, without the patches that ComfyUI itself never applies.

    It also serves models with quantised layers, for which that method fails.
    """
    quantised = has_quantised(patcher.model)
    found = _quantised_with_patches(patcher, prefix) if quantised else patcher.get_key_patches(prefix or None)
    dynamic = patcher.is_dynamic()
    for key in found.keys() & patcher.patches.keys():
        if _never_patched(patcher.model, key, dynamic):
            found[key] = found[key][:1]
    return found


def _never_patched(model: torch.nn.Module, key: str, dynamic: bool) -> bool:
    """Tell whether ComfyUI loads a weight as it is, whatever patches it has, as ``ModelPatcher.load`` does.

    It does so with weights of modules that have layers below them (``modulation`` of a block), and with buffers. With
    dynamic VRAM it does so also with weights of layers that are not its own. Merged models have patches on all of them.
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
