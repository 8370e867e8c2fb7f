"""Owner of the code of a function or an object: ComfyUI, torch, Python, this pack, or another pack."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "einops", "comfy_kitchen", "comfy_aimdo", "safetensors", "numpy", "scipy", "torchsde", "tqdm")
_PACKS = ("custom_nodes", "site-packages", "dist-packages", "tests")
"""Folders in which the code of others lies, wherever they are."""
_OURS = __name__.rpartition(".comfy_model")[0]
_MOST_WRAPPED = 16


def wrapped(function: Any) -> Iterator[Any]:
    """A function and those that it says it wraps."""
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
