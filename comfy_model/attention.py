"""Name and exactness of the attention that ComfyUI computes natively; an engine's is exact, or calls the same function.

Newer versions of ComfyUI let users choose it for one model (*Model Attention Backend*, an override in the model's
options) or for all (``--use-ck-attention``). A checkpoint or a LoRA may also state an attention that a layer prefers.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

OVERRIDE = "optimized_attention_override"
"""Key in a call's options of a function that replaces the attention of all layers."""

EXACT = ("pytorch", "split", "sub_quad", "xformers", "flash")
"""ComfyUI's names of functions that compute attention exactly, up to rounding."""

_KNOWN_INEXACT = "int8"
"""Part of the names of functions close to exact attention. Layers that prefer them get an engine and a remark."""

_KJNODES = "PathchSageAttentionKJ.patch.<locals>.attention_override_sage"
"""Name of the override of KJNodes' patch, which calls one kernel of SageAttention, whatever the layer or step."""

Looks = weakref.WeakKeyDictionary[Callable, str | None]
"""Names of functions, or None where they are exact."""

_overrides, _functions = Looks(), Looks()


def other_attention(override: Callable) -> str | None:
    """Return the name of an override that may compute inexact attention, or None. Cheap after the first time."""
    return _look(override, _look_at_override, _overrides)


def preference_class() -> type | None:
    """Return the class of parts that only say which attention their layer prefers; None where ComfyUI has none."""
    from comfy.ldm.modules import attention

    return getattr(attention, "ComfyAttention", None)


def part_replaced(parts: Mapping[str, Any], prefix: str) -> str | None:
    """Return the name of the first replaced part below ``prefix`` that an engine would lose, or None.

    Parts from a LoRA's ``config`` do not count if they only state a preference that engines may ignore.

    Args:
        parts: a patcher's replaced parts: name -> object.
    """
    kind = preference_class()
    names = (name for name in parts if f"{name}.".startswith(prefix))
    return next((n for n in names if type(parts[n]) is not kind or _not_passed_over(parts[n]) is not None), None)


def unknown_preference(module: torch.nn.Module, patcher: ModelPatcher, prefix: str) -> str | None:
    """Return the name of a layer's preferred attention that an engine should not replace, or None."""
    return next(filter(None, map(_not_passed_over, _preferences(module, patcher, prefix))), None)


def callable_choice(override: Callable | None) -> Callable | None:
    """Return the inexact attention that a user chose and blocks of an engine can call, or None.

    That is a function of ComfyUI's table, or KJNodes' patch. Other overrides may compute by layer or by step.

    Args:
        override: by which it was chosen; None for that of all models.
    """
    from comfy.ldm.modules import attention

    function = attention.optimized_attention if override is None else _wrapped(override)
    if function is None:
        return override if getattr(override, "__qualname__", "").endswith(_KJNODES) else None
    known = any(function is one for one in _registered().values())
    return function if known and _inexact(function) is not None else None


def choice_for(module: torch.nn.Module, patcher: ModelPatcher, prefix: str) -> Callable | None:
    """Return ``callable_choice`` for a network that a patcher samples with."""
    override = _override(patcher)
    if override is None and any(map(_preferred, _preferences(module, patcher, prefix))):
        return None  # then layers have attention of their own
    return callable_choice(override)


def _override(patcher: ModelPatcher) -> Callable | None:
    return patcher.model_options.get("transformer_options", {}).get(OVERRIDE)


def remark(module: torch.nn.Module, patcher: ModelPatcher, prefix: str, called: bool = False) -> str:
    """Return a remark on a network's native attention, mostly ``""``.

    Args:
        called: whether its engine calls what the user chose; otherwise it computes attention exactly.
    """
    from comfy.ldm.modules import attention

    if called:
        chosen = choice_for(module, patcher, prefix)
        return "" if chosen is None else f"Attention is by {_name(chosen)}, as native computes it"
    if _override(patcher) is not None:
        return ""  # the override is exact, see ``other_attention``, and all layers compute with it
    name = _inexact(attention.optimized_attention)
    if name is None:
        name = next(filter(None, map(_preferred, _preferences(module, patcher, prefix))), None)
    if name is None and _is_int8_with_its_weights(module):
        name = _KNOWN_INEXACT
    if name is None:
        return ""
    how = "some attention in INT8" if _KNOWN_INEXACT in name else f"attention by {name}"
    return f"Native computes {how}; the engine is exact"


def _is_int8_with_its_weights(module: torch.nn.Module) -> bool:
    """Tell whether native attends in INT8 because weights are in 8 bits, as newer versions of MiniMax H3's VAE do."""
    source = sys.modules.get(type(module).__module__)
    if not getattr(source, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", False):
        return False
    from comfy.quant_ops import QuantizedTensor

    return any(isinstance(weight, QuantizedTensor) for weight in module.parameters())


def _preferences(module: torch.nn.Module, patcher: ModelPatcher, prefix: str) -> Iterator[object]:
    """Iterate over the parts by which layers of a network prefer an attention when a patcher samples with it."""
    kind = preference_class()
    names = () if kind is None else (name for name, layer in module.named_modules() if type(layer) is kind)
    return (patcher.get_model_object(prefix + name) for name in names)


def _preferred(part: object) -> str | None:
    """Return the name of the attention that a layer prefers, or None where it is exact."""
    function = getattr(part, "function", None)
    return None if function is None else _inexact(function)


def _not_passed_over(part: object) -> str | None:
    """Return the name of the attention that a layer prefers and an engine may not replace, or None."""
    name = _preferred(part)
    return None if name is None or _KNOWN_INEXACT in name else name


def _inexact(function: Callable) -> str | None:
    """Return the name of a function that may compute inexact attention, or None."""
    return _look(function, lambda one: None if _is_exact(one) else _name(one), _functions)


def _look(function: Callable, look: Callable[[Callable], str | None], known: Looks) -> str | None:
    try:
        return known[function]
    except KeyError:
        found = known[function] = look(function)
        return found
    except TypeError:  # no weak reference, or no hash
        return look(function)


def _look_at_override(override: Callable) -> str | None:
    function = _wrapped(override)
    return _name(override) if function is None else _inexact(function)


def _wrapped(override: Callable) -> Callable | None:
    """Return the function inside an override by ComfyUI's own setter; None for other overrides."""
    from comfy.model_patcher import ModelPatcher

    setter = getattr(ModelPatcher, "set_model_optimized_attention", None)
    made_of = getattr(getattr(setter, "__code__", None), "co_consts", ())
    code, cells = getattr(override, "__code__", None), getattr(override, "__closure__", None)
    if code is None or cells is None or len(cells) != 1 or not any(constant is code for constant in made_of):
        return None
    function = cells[0].cell_contents
    # the form for tensors that are handed over is the function's own
    same = getattr(override, "container_function", None) is getattr(function, "container_function", None)
    return function if same and callable(function) else None


def _is_exact(function: Callable) -> bool:
    """Tell whether ComfyUI knows a function by a name of exact attention, and defines it itself."""
    from comfy.ldm.modules import attention

    known = [_registered().get(name) for name in EXACT]
    if not any(function is one for one in (*known, getattr(attention, "attention_basic", None))):
        return False
    return getattr(inspect.unwrap(function), "__globals__", None) is vars(attention)


def _registered() -> Mapping[str, Callable]:
    """ComfyUI's table of attention functions by name, as ``get_attention_function`` reads it."""
    from comfy.ldm.modules import attention

    return getattr(attention, "REGISTERED_ATTENTION_FUNCTIONS", {})


def _name(function: Callable) -> str:
    """Return ComfyUI's name of a function, else its module and its own name, without a path."""
    for name, known in _registered().items():
        if known is function:
            return name
    named = function if hasattr(function, "__qualname__") else type(function)
    module = re.split(r"[./\\]", str(named.__module__))[-1]
    return f"{module}.{named.__qualname__.split('.')[-1]}"
