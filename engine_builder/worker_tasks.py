"""Tasks for a worker process, as JSON: a network, a backend, a GPU. ``worker.task`` reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .. import backends
from ..architectures import families
from ..architectures.shapes import TensorSpec
from ..backends import Backend, Progress
from ..comfy_model.network import NativeNetwork
from .standalone import STACK_VARIABLE
from .worker.task import Task
from .worker_process import Log

Runner = Callable[[Task, Progress, Log, Mapping[str, str]], dict]
"""Does a task of ``worker.steps``; see ``worker_process.run_in_worker``."""


class WeightsChanged(Exception):
    """The weights changed between hashing and reading."""


def comfyui_folder() -> Path:
    """Return the folder of the ComfyUI that this process runs."""
    return Path(sys.modules["comfy.model_management"].__file__).resolve().parents[1]


def tensors_task(network: NativeNetwork, precision: str) -> Task:
    """The part of a task with an engine's inputs and outputs."""
    architecture = network.architecture()
    return {
        "precision": precision,
        "inputs": [_spec_json(spec) for spec in architecture.engine_inputs(network.module, precision)],
        "outputs": [_spec_json(spec) for spec in architecture.outputs(network.module, precision)],
    }


def network_task(network: NativeNetwork, structure: str) -> Task:
    """The part of a task by which a child finds a network, without its weights; see ``comfy_model.snapshot``."""
    return {
        "architecture": network.architecture().name,
        "family_folders": list(families.__path__),
        "structure": structure,
        "comfyui": str(comfyui_folder()),
    }


def weights_task(weights: dict, weights_file: Path) -> Task:
    """The part of a task by which a child finds a network's weights; see ``snapshot.write_weights``."""
    return {"weights": weights, "weights_file": str(weights_file)}


def backend_task(backend: Backend) -> Task:
    """The part of a task by which a child finds a backend."""
    return {"backend": backend.name, "backend_folders": list(backends.__path__)}


def only_gpu(device: torch.device) -> dict[str, str]:
    """Environment in which a GPU other than the first is the only one, so that a backend builds for it."""
    if device.type != "cuda" or not device.index:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(n) for n in range(device.index + 1)]
    return {"CUDA_VISIBLE_DEVICES": names[device.index]}


def stack_of(backend: Backend) -> dict[str, str]:
    """Environment in which a build has the stack that its backend needs."""
    return {STACK_VARIABLE: str(backend.build_stack)} if backend.build_stack else {}


def _spec_json(spec: TensorSpec) -> dict:
    return {**spec.to_json(), "sample": spec.sample, "late": spec.late}
