"""What a build does outside the server's process: export with its check against native, and the backend's build.

They take and give JSON and never see the live model. The export needs no GPU, the backend's build no ComfyUI. A
backend that runs live weights has one step instead: see ``compile_step``. An engine from elsewhere is checked: see
``check_step``.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .. import backends
from ..architectures.tensors import Profile, TensorSpec
from ..backends import BuildRequest, Progress
from .check_step import check_engine
from .compile_step import compile_network
from .native_classes import import_comfyui

if TYPE_CHECKING:
    from .parity import Case

TRACED = {"B": 2, "H": 9, "W": 12, "T": 77, "HB": 2}
"""Sizes of the traced example, inside the profile or not: small, since half precision is slow on a CPU."""

Task = dict
"""JSON: ``step``, ``folder``, ``inputs``, ``outputs``, ``profile``, ``precision`` and what each step says."""


def export(task: Task, progress: Progress) -> dict:
    """Export the network to ONNX in the task's folder and compare it with native.

    The task has ``architecture``, ``structure``, ``weights`` (name -> shape, offset), ``weights_file`` (the data file
    of the graph in the task's folder), ``limit`` and ``comfyui`` (where ComfyUI lies).
    """
    progress("starting the exporter", 0.0)
    import_comfyui(task["comfyui"])
    from .parity import check_parity

    outputs = _tensors(task)[1]
    started = time.perf_counter()
    graph, cases, exported = _graph_and_reference(task, progress)  # with the module gone, its memory is the session's
    progress("checking against native", 0.7)
    parity = check_parity(graph, cases, outputs, task["precision"], task["limit"])
    return {
        "onnx": graph.name,
        "parity": dict(parity),
        "seconds": {"export": exported - started, "parity": time.perf_counter() - exported},
    }


def _graph_and_reference(task: Task, progress: Progress) -> tuple[Path, list[Case], float]:
    """The network as a graph, what native computes with it, and when the graph was done."""
    import torch

    from ..architectures import architectures
    from .handover import offsets_of, restore
    from .onnx_export import export_onnx
    from .parity import reference_cases

    inputs, outputs, profile = _tensors(task)
    dtype, weights_file = getattr(torch, task["precision"]), Path(task["weights_file"])
    module = restore(task["structure"], task["weights"], weights_file, dtype)
    offsets = offsets_of(module, task["weights"])
    architecture = architectures()[task["architecture"]]
    architecture.hint_encoder(module)  # the engine takes the hint encoded
    function = architecture.function(module)
    progress("exporting", 0.1)
    graph = export_onnx(function, inputs, outputs, TRACED, weights_file.parent, offsets)
    exported = time.perf_counter()
    progress("running native", 0.5)
    return graph, reference_cases(function, inputs, profile), exported


def build(task: Task, progress: Progress) -> dict:
    """Let the backend build from the ONNX graph in the task's folder.

    The task has ``onnx``, ``target``, ``backend`` (its module's name) and ``backend_folders`` (where that may lie).
    """
    backends.__path__ = task["backend_folders"]
    module = importlib.import_module(f".{task['backend']}", backends.__name__)
    inputs, outputs, profile = _tensors(task)
    folder = Path(task["folder"])
    request = BuildRequest(folder / task["onnx"], inputs, outputs, profile, folder, task["target"])
    started = time.perf_counter()
    files = module.BACKEND.build(request, progress)
    return {"files": list(files), "seconds": {"build": time.perf_counter() - started}}


STEPS = {"export": export, "build": build, "compile": compile_network, "check": check_engine}


def _tensors(task: Task) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], Profile]:
    inputs, outputs = (tuple(TensorSpec.from_json(s) for s in task[name]) for name in ("inputs", "outputs"))
    return inputs, outputs, Profile.from_json(task["profile"])
