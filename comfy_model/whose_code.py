"""Owner of the code of a function or an object: ComfyUI, torch, Python, this pack, or another pack.

``is_known`` asks for any code. The functions for controls ask whether ComfyUI's own code, and no other, computes.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase, ControlNet

_LIBRARIES = ("torch", "torchvision", "einops", "comfy_kitchen", "comfy_aimdo", "safetensors", "numpy", "scipy",
              "torchsde", "tqdm")  # fmt: skip
_PACKS = ("custom_nodes", "site-packages", "dist-packages", "tests")
"""Names of folders with the code of other packs and libraries."""
_OURS = __name__.rpartition(".comfy_model")[0]
_MOST_WRAPPED = 16


def wrapped(function: Any) -> Iterator[Any]:
    """A function and the functions that it wraps."""
    for _ in range(_MOST_WRAPPED):
        yield function
        if (function := getattr(function, "__wrapped__", None)) is None:
            return


def code_of(value: Any) -> types.CodeType | None:
    """The code of a Python function, or None."""
    return getattr(value, "__code__", None)


def is_known(value: Any) -> bool:
    """Tell whether a function, class or object is ComfyUI's, torch's, Python's or this pack's own."""
    if isinstance(value, functools.partial):
        return is_known(value.func)
    if str(getattr(value, "__module__", "")).startswith(f"{_OURS}."):
        return True
    if (code := code_of(value)) is not None:
        return _is_known_file(code.co_filename)
    owner = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return _is_known_module(str(getattr(owner, "__module__", None) or "builtins"))


def pack_of(value: Any) -> str:
    """Return whose a function or object is: the folder of the pack, else the name of its module. No path."""
    value = getattr(value, "func", value)
    code = code_of(value)
    owner = value if hasattr(value, "__module__") else type(value)
    module = str(owner.__module__)
    file = code.co_filename if code is not None else getattr(sys.modules.get(module), "__file__", None) or ""
    parts = Path(file).parts
    if "custom_nodes" in parts[:-1]:
        return Path(parts[len(parts) - parts[::-1].index("custom_nodes")]).stem
    return module.split(".")[0]


@functools.cache
def _is_known_module(name: str) -> bool:
    if name.split(".")[0] in (*_LIBRARIES, *sys.stdlib_module_names) or f"{name}.".startswith(f"{_OURS}."):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and _is_known_file(file)


@functools.cache
def _is_known_file(name: str) -> bool:
    if name.startswith("<frozen "):
        return True
    if any(name.startswith(folder) for folder in _own_folders()):
        return True
    return any(name.startswith(folder) and not set(Path(name[len(folder) :]).parts).intersection(_PACKS)
               for folder in _shared_folders())  # fmt: skip


@functools.cache
def _own_folders() -> tuple[str, ...]:
    """The folders of libraries, each with a separator at its end."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return tuple(f"{Path(file).parent}{os.sep}" for file in files if file)


@functools.cache
def _shared_folders() -> tuple[str, ...]:
    """The folders of ComfyUI, of this pack and of Python's library, in which other packs' code may lie too."""
    import comfy.controlnet

    folders = Path(comfy.controlnet.__file__).parents[1], Path(__file__).parents[1], Path(os.__file__).parent
    return tuple(f"{folder}{os.sep}" for folder in folders)


_METHODS = ("get_control", "control_merge")
"""Methods whose work ``control_stack`` does by itself for a ControlNet."""


@functools.cache
def _controlnets() -> types.ModuleType:
    """ComfyUI's module of controls. Imported late: not every process that reads this module can find ComfyUI."""
    import comfy.controlnet

    return comfy.controlnet


def computes_as_comfyui(control: ControlNet) -> bool:
    """Tell whether a ControlNet runs ComfyUI's code: no pack has put methods of its own on it or on its class."""
    if _own_methods(control):
        return False
    comfyui = _controlnets()
    return all(_file_of(getattr(comfyui.ControlNet, name)) == comfyui.__file__ for name in _METHODS)


def makes_hints_as_comfyui(control: ControlNet) -> bool:
    """Tell whether ComfyUI's code alone makes a hint; it changes no image in place."""
    from comfy import utils

    comfyui = _controlnets()
    if _file_of(utils.common_upscale) != utils.__file__ or not computes_as_comfyui(control):
        return False
    return _file_of(control.preprocess_image) == comfyui.__file__


def is_foreign(control: ControlNet) -> bool:
    """Tell whether another pack's code computes for a ControlNet or makes its hint."""
    from comfy import utils

    makes_hints = (control.preprocess_image, utils.common_upscale)
    return has_foreign_methods(control) or not all(map(_is_comfyuis, makes_hints))


def has_foreign_methods(control: ControlBase) -> bool:
    """Tell whether a control has a method or a class of another pack."""
    kind = type(control)
    if _own_methods(control) or kind.__module__.split(".")[0] != "comfy":
        return True
    return not all(_is_comfyuis(getattr(kind, name)) for name in _METHODS)


def is_stock(function: Callable[..., Any]) -> bool:
    """Tell whether a function and all functions of its module that it names are ComfyUI's.

    Then nobody else sees its arguments.
    """
    if not _is_comfyuis(function):
        return False
    around = function.__globals__
    named = (around[name] for name in function.__code__.co_names if name in around)
    return all(_is_comfyuis(one) for one in named if callable(one) and not isinstance(one, type))


def _own_methods(control: ControlBase) -> list[Any]:
    """Methods set on the instance itself."""
    kind = _controlnets().ControlNet
    return [value for name, value in vars(control).items() if callable(getattr(kind, name, None))]


def _is_comfyuis(function: Any) -> bool:
    file = _file_of(function)
    return file is not None and _is_in_comfyui(file)


@functools.cache
def _is_in_comfyui(file: str) -> bool:
    return Path(file).is_relative_to(Path(_controlnets().__file__).parent)


def _file_of(function: Any) -> str | None:
    code = code_of(function)
    return code.co_filename if code is not None else None
