"""Whether what another pack could have replaced is ComfyUI's own code."""

from __future__ import annotations

from typing import Any

import comfy.controlnet
import comfy.utils
from comfy.controlnet import ControlNet

_METHODS = ("get_control", "control_merge")
"""What ``control_stack`` does by itself for a ControlNet."""


def computes_as_comfyui(control: ControlNet) -> bool:
    """Whether a ControlNet does what ComfyUI's code says: no pack has put methods of its own on it or on its class."""
    if any(hasattr(ControlNet, name) for name in vars(control)):
        return False
    return all(_source(getattr(ControlNet, name)) == comfy.controlnet.__file__ for name in _METHODS)


def makes_hints_as_comfyui(control: ControlNet) -> bool:
    """Whether what makes a hint is ComfyUI's code, which changes no image in place."""
    if _source(comfy.utils.common_upscale) != comfy.utils.__file__ or not computes_as_comfyui(control):
        return False
    return _source(control.preprocess_image) == comfy.controlnet.__file__


def _source(function: Any) -> str | None:
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else None
