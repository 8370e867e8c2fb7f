"""Structure hash: a hash of all of a network but its weights. Engines without weights of their own serve a structure.

All values that a layer's constructor set count, because they may change its results: numbers, words, functions, plain
objects and buffers. Attributes that ComfyUI adds to load a layer do not count, nor a load's dtype and device: a file
has one structure however it was loaded. Engines for live weights take weights in their stored dtypes, so their
structure also lists fp8 and quantised weights.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

import numpy
import torch

from .. import architectures
from ..architectures import families
from ..engine_library.manifest import LAYOUT_PREFIX
from .attention import preference_class
from .changed_layers import MACHINERY, answers_about, left_by_forward, methods
from .comfyui_shims import is_of_loading
from .weight_formats import kept_dtypes

_OF_A_LOAD = ("dtype", "device", "weight_function", "bias_function", "scale_weight", "scale_input")
"""Attributes that loading sets on a layer; fp8 layers have scales without an effect."""

_OPERATIONS, _ATTENTION = "comfy.ops", "comfy.ldm.modules.attention"
"""Modules in which the user's flags and GPU choose a layer class or a function."""

_ADDRESS = " at 0x"
"""Part of the default ``repr`` of objects."""

_ELSEWHERE = "-"
"""Text of a value that is written elsewhere, or belongs to no structure."""

_EARLIER = {".token_layers.PlainNorm": ".rotary.PlainNorm"}
"""Places of our classes that have moved -> the places that stored keys name."""


def structure_hash(module: torch.nn.Module, live: bool = False) -> str:
    """Hash a network's names, shapes and settings: it stands for any weights in the identity of its engines.

    Cheap after the first time, for a network that an engine was looked up for.

    Args:
        live: whether the engines take live weights, as they are stored.
    """
    known, key = answers_about(module), ("layout", live)
    if key not in known:
        lines = "\n".join((*_lines(module, _Visited()), *(kept_dtypes(module) if live else ())))
        known[key] = LAYOUT_PREFIX + hashlib.sha256(lines.encode()).hexdigest()
    return known[key]


def structure_lines(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names, shapes and settings of a network, or of one of its layers, in words."""
    return tuple(_lines(module, _Visited()))


class _Visited:
    """Objects already visited, or on the stack."""

    def __init__(self) -> None:
        self.modules: set[torch.nn.Module] = set()
        self.within: list[object] = []  # the stack


def _lines(module: torch.nn.Module, visited: _Visited) -> Iterator[str]:
    yield from (f"{name} {tuple(parameter.shape)}" for name, parameter in sorted(module.named_parameters()))
    ignored = preference_class()
    layers = [(name, layer) for name, layer in module.named_modules() if type(layer) is not ignored]
    visited.modules.update(layer for _, layer in layers)
    for name, layer in layers:
        yield f"{name} is a {_kind(type(layer))}"
        buffers = ((leaf, buffer) for leaf, buffer in sorted(layer._buffers.items()) if buffer is not None)
        yield from (f"{name} {leaf} {_values(buffer)}" for leaf, buffer in buffers)
        skipped = MACHINERY | methods(type(layer)) | left_by_forward(type(layer))
        yield from (f"{name} {setting}" for setting in _settings(layer.__dict__, skipped, visited))


def _settings(attributes: Mapping[str, object], skipped: Iterable[str], visited: _Visited) -> Iterator[str]:
    for name in sorted(attributes.keys() - skipped):
        value = attributes[name]
        if value is None or name in _OF_A_LOAD or "comfy" in name or is_of_loading(name, value):
            continue
        if (text := _text(value, visited)) != _ELSEWHERE:
            yield f"{name} {text}"


def _text(value: object, visited: _Visited) -> str:
    """Return a setting in words that are the same in each process, or ``_ELSEWHERE``."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.nn.Parameter) or any(value is x for x in visited.within):
        return _ELSEWHERE
    if isinstance(value, torch.Tensor):
        return _values(value)
    if isinstance(value, type):
        return _ELSEWHERE if _is_of(value, _OPERATIONS) else _place(value)
    if isinstance(value, types.FunctionType) and _is_of(value, _ATTENTION):
        return _ELSEWHERE
    if isinstance(value, types.BuiltinFunctionType):
        return _place(value)
    visited.within.append(value)
    try:
        return _text_of_several(value, visited)
    finally:
        visited.within.pop()


def _text_of_several(value: object, visited: _Visited) -> str:
    """Return an object with parts, in words."""
    if isinstance(value, torch.nn.Module):
        return _ELSEWHERE if value in visited.modules else "; ".join(_lines(value, visited))
    if isinstance(value, Enum):
        return f"{_place(type(value))} {value.name}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(k, visited)}: {_text(v, visited)}' for k, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text(part, visited) for part in value))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_text(part, visited) for part in value)})"
    if isinstance(value, functools.partial):
        return f"{_text(value.func, visited)} of {_text(value.args, visited)} {_text(value.keywords, visited)}"
    if isinstance(value, types.FunctionType):
        return _function(value, visited)
    if isinstance(value, types.MethodType):
        return f"{_place(value.__func__)} of {_text(value.__self__, visited)}"
    if isinstance(value, numpy.ndarray | numpy.generic):
        return f"{value.shape} {value.tolist()!r}"
    own = getattr(value, "__dict__", None)
    if own is None:
        text = repr(value)
        return _kind(type(value)) if _ADDRESS in text else text
    return f"{_kind(type(value))} ({', '.join(_settings(own, (), visited))})"


def _function(function: types.FunctionType, visited: _Visited) -> str:
    """Return a function in words, with defaults and closure; for a lambda also names and constants of its code."""
    code, cells = function.__code__, function.__closure__ or ()
    inside = [_text(cell.cell_contents, visited) for cell in cells]
    if function.__name__ == "<lambda>":
        inside += [*code.co_names, *(repr(const) for const in code.co_consts if not isinstance(const, types.CodeType))]
    return f"{_place(function)} of {_text(function.__defaults__, visited)} {inside}"


def _values(tensor: torch.Tensor) -> str:
    """Return the shape and the hash of a buffer, or of another tensor whose values a graph contains."""
    if tensor.is_meta:
        return str(tuple(tensor.shape))
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {hashlib.sha256(memoryview(data)).hexdigest()}"


def _kind(kind: type) -> str:
    """Return the name of a layer's class; classes that cast their weights have the name of the plain layer."""
    return kind.__name__ if hasattr(kind, "comfy_cast_weights") else _place(kind)


def _place(found: type | types.FunctionType) -> str:
    """The module and name of a class or function; our own without the packages, which are not part of stored keys."""
    module = getattr(found, "__module__", None) or ""
    for package in (families.__name__, architectures.__name__):
        module = module.removeprefix(package)
    place = f"{module}.{found.__qualname__}"
    return _EARLIER.get(place, place)


def _is_of(found: type | types.FunctionType, module: str) -> bool:
    return getattr(found, "__module__", None) == module
