"""Whether what another pack could have replaced is ComfyUI's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.utils
from comfy.controlnet import ControlNet

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
    kind = type(control)
    methods = [*_own_methods(control), *(getattr(kind, name) for name in _METHODS)]
    makes_hints = (control.preprocess_image, comfy.utils.common_upscale)
    return kind.__module__.split(".")[0] != "comfy" or not all(map(_is_comfyuis, (*methods, *makes_hints)))


def _own_methods(control: ControlNet) -> list[Any]:
    """What was put on an object in the place of its class's methods; values that a class has too are none."""
    return [value for name, value in vars(control).items() if callable(getattr(ControlNet, name, None))]


def _is_comfyuis(function: Any) -> bool:
    source = _source(function)
    return source is not None and Path(source).is_relative_to(Path(comfy.controlnet.__file__).parent)


def makes_hints_as_comfyui(control: ControlNet) -> bool:
    """Whether what makes a hint is ComfyUI's code, which changes no image in place."""
    if _source(comfy.utils.common_upscale) != comfy.utils.__file__ or not computes_as_comfyui(control):
        return False
    return _source(control.preprocess_image) == comfy.controlnet.__file__


def _source(function: Any) -> str | None:
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else None
