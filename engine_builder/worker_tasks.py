"""Tasks for a worker process, as JSON: a network, a backend, a GPU. ``worker.task`` reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from .. import backends
from ..architectures import families
from ..architectures.shapes import TensorSpec
from ..backends import Backend, Progress
from ..comfy_model.network import NativeNetwork
from ..comfy_model.snapshot import Step, write_structure, write_weights
from ..engine_library import EngineIdentity
from .standalone import STACK_VARIABLE
from .worker.onnx_export import DATA_NAME
from .worker.task import Task
from .worker_process import Log

Runner = Callable[[Task, Progress, Log, Mapping[str, str]], dict]
"""Does a task of ``worker.steps``; see ``worker_process.run_in_worker``."""


class WeightsChanged(Exception):
    """The weights changed between hashing and reading."""


def comfyui_folder() -> Path:
    """Return the folder of the ComfyUI that this process runs."""
    return Path(sys.modules["comfy.model_management"].__file__).resolve().parents[1]


def tensors_task(precision: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Task:
    """The part of a task with an engine's inputs and outputs."""
    return {
        "precision": precision,
        "inputs": [_spec_json(spec) for spec in inputs],
        "outputs": [_spec_json(spec) for spec in outputs],
    }


def network_task(network: NativeNetwork, architecture: str, precision: str, live: bool = False) -> Task:
    """The part of a task by which a child finds a network, without its weights; see ``snapshot.write_structure``."""
    return {
        "architecture": architecture,
        "family_folders": list(families.__path__),
        "structure": write_structure(network, getattr(torch, precision), live),
        "comfyui": str(comfyui_folder()),
    }


def weights_task(network: NativeNetwork, identity: EngineIdentity, folder: Path, step: Step) -> tuple[Task, str]:
    """Write a network's weights into a folder: the part of a task by which a child finds them, and their hash.

    Raises:
        WeightsChanged: they are no longer the weights of ``identity``.
    """
    file = folder / DATA_NAME
    read, index = write_weights(network, getattr(torch, identity.precision), file, step)
    if not identity.any_weights and read != identity.weights:
        raise WeightsChanged
    return {"weights": index, "weights_file": str(file)}, read


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
    return {**spec.to_json(), "sample": spec.sample}
