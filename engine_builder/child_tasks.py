"""What the server hands to a child process besides the network: where things are, and on which GPU."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .. import backends
from ..backends import Backend, Progress
from .child_process import Log
from .steps import Task

Runner = Callable[[Task, Progress, Log, Mapping[str, str]], dict]
"""Does a task of ``steps``; see ``child_process.run_in_child``."""


class WeightsChanged(Exception):
    """The weights that were read are not those that were hashed."""


def comfyui_folder() -> Path:
    """Where the ComfyUI lies that this process runs."""
    return Path(sys.modules["comfy.model_management"].__file__).resolve().parents[1]


def backend_in_child(backend: Backend) -> Task:
    """The part of a task by which a child finds a backend."""
    return {"backend": _module_of(backend), "backend_folders": list(backends.__path__)}


def _module_of(backend: Backend) -> str:
    """The name of the module in a backends' folder that defines this backend."""
    for entry in pkgutil.iter_modules(backends.__path__):
        if getattr(sys.modules.get(f"{backends.__name__}.{entry.name}"), "BACKEND", None) is backend:
            return entry.name
    raise ValueError(f"backend {backend.name} is in none of {backends.__path__}")


def only_gpu(device: torch.device) -> dict[str, str]:
    """Environment in which a GPU other than the first is the only one, so that a backend builds for it."""
    if device.type != "cuda" or not device.index:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(n) for n in range(device.index + 1)]
    return {"CUDA_VISIBLE_DEVICES": names[device.index]}
