"""Reading a task: JSON that the server has written, see ``engine_builder.worker_tasks``.

Each has its ``step``, ``folder``, ``precision``, ``inputs`` and ``outputs``. One that needs the network has its
``architecture`` and ``family_folders`` (where that may lie), ``structure`` and ``comfyui`` (where ComfyUI lies);
one that needs its weights too has ``weights`` (name -> shape, offset, dtype) and ``weights_file``. One that needs the
backend has its name in ``backend`` and in ``backend_folders`` where that may lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ... import backends
from ...architectures import architectures, families
from ...architectures.shapes import TensorSpec

if TYPE_CHECKING:
    import torch

    from ...architectures import Architecture
    from ...backends import Backend

Task = dict


def tensors_of(task: Task) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The engine's inputs and outputs."""
    inputs, outputs = (tuple(TensorSpec.from_json(spec) for spec in task[name]) for name in ("inputs", "outputs"))
    return inputs, outputs


def architecture_of(task: Task) -> Architecture:
    """The family of the task's network. ComfyUI has to be importable."""
    families.__path__ = task["family_folders"]
    return architectures()[task["architecture"]]


def function_of(task: Task, device: str = "cpu") -> tuple[torch.nn.Module, torch.nn.Module]:
    """The network as a function of the engine's inputs, and its module, with the task's weights or random ones.

    ComfyUI has to be importable.

    Args:
        device: where its weights are to be; on ``meta`` it has none.
    """
    import torch

    from ...comfy_model.snapshot import restore, with_random_weights, without_weights

    architecture = architecture_of(task)
    if "weights_file" in task:
        module = restore(task["structure"], task["weights"], Path(task["weights_file"])).to(device)
    elif device == "meta":
        module = without_weights(task["structure"])
    else:
        module = with_random_weights(task["structure"], torch.device(device))
    function = architecture.function(module)
    function = function.eval().requires_grad_(False)
    return (function.to(device) if device == "meta" else function), module


def backend_of(task: Task) -> Backend:
    """The backend that does the work."""
    backends.__path__ = task["backend_folders"]
    return backends.backends()[task["backend"]]
