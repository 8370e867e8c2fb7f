"""Whether what another pack could have replaced is ComfyUI's own code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.utils
from comfy.controlnet import ControlBase, ControlNet

_METHODS = ("get_control", "control_merge")
"""What ``control_stack`` does by itself for a ControlNet."""


def computes_as_comfyui(control: ControlNet) -> bool:
    """Whether a ControlNet does what ComfyUI's code says: no pack has put methods of its own on it or on its class."""
    if _own_methods(control):
        return False
    return all(_source(getattr(ControlNet, name)) == comfy.controlnet.__file__ for name in _METHODS)


def is_another_packs(control: ControlNet) -> bool:
    """Whether it is another pack's code that computes for a ControlNet, and not ComfyUI's, be it another one than was
    known."""
    makes_hints = (control.preprocess_image, comfy.utils.common_upscale)
    return another_pack_asks(control) or not all(map(_is_comfyuis, makes_hints))


def another_pack_asks(control: ControlBase) -> bool:
    """Tell whether a control has a method or a class of another pack."""
    kind = type(control)
    if _own_methods(control) or kind.__module__.split(".")[0] != "comfy":
        return True
    return not all(_is_comfyuis(getattr(kind, name)) for name in _METHODS)


def is_comfyuis_alone(function: Callable[..., Any]) -> bool:
    """Tell whether a function and all functions of its module that it names are ComfyUI's.

    Then nobody else sees its arguments.
    """
    if not _is_comfyuis(function):
        return False
    around = function.__globals__
    named = (around[name] for name in function.__code__.co_names if name in around)
    return all(_is_comfyuis(one) for one in named if callable(one) and not isinstance(one, type))


def _own_methods(control: ControlBase) -> list[Any]:
    """What was put on an object in the place of its class's methods; values that a class has too are none."""
    return [value for name, value in vars(control).items() if callable(getattr(ControlNet, name, None))]


def _is_comfyuis(function: Any) -> bool:
    source = _source(function)
    return source is not None and _is_in_comfyui(source)


@functools.cache
def _is_in_comfyui(file: str) -> bool:
    return Path(file).is_relative_to(Path(comfy.controlnet.__file__).parent)


def makes_hints_as_comfyui(control: ControlNet) -> bool:
    """Whether what makes a hint is ComfyUI's code, which changes no image in place."""
    if _source(comfy.utils.common_upscale) != comfy.utils.__file__ or not computes_as_comfyui(control):
        return False
    return _source(control.preprocess_image) == comfy.controlnet.__file__


def _source(function: Any) -> str | None:
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else None
