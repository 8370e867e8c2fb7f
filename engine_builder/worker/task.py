"""Reading a task: JSON that the server has written, see ``engine_builder.child_tasks``.

Each has its ``step``, ``folder``, ``precision``, ``inputs`` and ``outputs``. One that needs the network has its
``architecture`` and ``architecture_folders`` (where that may lie), ``structure``, ``weights`` (name -> shape, offset),
``weights_file`` and ``comfyui`` (where ComfyUI lies). One that needs the backend has its name in ``backend`` and in
``backend_folders`` where that may lie.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ... import architectures, backends
from ...architectures.shapes import TensorSpec

if TYPE_CHECKING:
    import torch

    from ...backends import Backend

Task = dict
NO_TURN = nullcontext()


def tensors_of(task: Task) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The engine's inputs and outputs."""
    inputs, outputs = (tuple(TensorSpec.from_json(spec) for spec in task[name]) for name in ("inputs", "outputs"))
    return inputs, outputs


def function_of(
    task: Task, device: str = "cpu", joined: bool = False, turn: AbstractContextManager = NO_TURN, values: bool = True
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The network as a function of the engine's inputs, and its module, with the weights of the task's file.

    ComfyUI has to be importable.

    Args:
        joined: whether layers that take the same input are computed as one, as on live weights.
        turn: entered while weights are moved to the device.
        values: False when shapes are enough: the weights stay in the file and the parameters on the meta device.
    """
    import torch

    from ...comfy_model.snapshot import restore, without_weights

    architectures.__path__ = task["architecture_folders"]
    dtype, structure = getattr(torch, task["precision"]), task["structure"]
    if values:
        module = restore(structure, task["weights"], Path(task["weights_file"]), dtype)
    else:
        module, turn = without_weights(structure), NO_TURN
    architecture = architectures.architectures()[task["architecture"]]
    with turn:
        module = module.to(device) if values else module
        if joined:
            architecture.fuse_layers(module)
    function = architecture.function(module)
    return function.eval().requires_grad_(False), module


def backend_of(task: Task) -> Backend:
    """The backend that does the work."""
    backends.__path__ = task["backend_folders"]
    return backends.backends()[task["backend"]]
