"""Steps of a build outside the server's process: export with its check against native, and the backend's build.

They take and give JSON and never see the live model. The export needs no GPU, the backend's build no ComfyUI. A
backend that runs live weights has a single step of its own. The comparison of an engine with native is in ``validate``.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...architectures.shapes import Profile, symbols_in
from ...backends import BuildRequest, LiveTask, Progress
from ...comfy_model.comfyui_shims import import_comfyui
from .task import Task, architecture_of, backend_of, function_of, tensors_of
from .validate import check_engine

if TYPE_CHECKING:
    from .parity import Case


def export(task: Task, progress: Progress) -> dict:
    """Export the network to ONNX in the task's folder and compare it with native.

    The task has the network (see ``task``), ``limit``, and the sizes that are ``traced`` and ``compared``. It may have
    the task of ``build`` in ``then``: that is done in the same process, and its result is in ``built``.
    """
    progress("preparing the export", 0.0)
    import_comfyui(task["comfyui"])
    from .parity import check_parity

    outputs = tensors_of(task)[1]
    started = time.perf_counter()
    graph, cases, exported = _graph_and_reference(task, progress)
    gc.collect()  # blocks refer to themselves: the module is freed for the session
    progress("comparing with the normal model", 0.7)
    parity = check_parity(graph, cases, outputs, task["precision"], task["limit"])
    done = {
        "onnx": graph.name,
        "parity": dict(parity),
        "seconds": {"export": exported - started, "parity": time.perf_counter() - exported},
    }
    if "then" in task:
        progress(f"building with {task['then']['backend']}", 0.95)
        done["built"] = build({**task["then"], "onnx": graph.name}, progress)
    return done


def _graph_and_reference(task: Task, progress: Progress) -> tuple[Path, list[Case], float]:
    """The network as a graph, native's results, and the time at which the graph was done."""
    from ...comfy_model.snapshot import offsets_of
    from .onnx_export import export_onnx
    from .parity import reference_cases

    inputs, outputs = tensors_of(task)
    function, module = function_of(task)
    progress("exporting", 0.1)
    offsets = offsets_of(module, task["weights"])
    names = {parameter: name for name, parameter in module.named_parameters()}
    graph = export_onnx(function, inputs, outputs, task["traced"], Path(task["folder"]), offsets, names)
    exported = time.perf_counter()
    progress("running the normal model", 0.5)
    return graph, reference_cases(function, inputs, task["compared"]), exported


def build(task: Task, progress: Progress) -> dict:
    """Let the backend build from the ONNX graph in the task's folder.

    The task has ``onnx``, ``target``, ``profile``, ``any_weights``, ``options`` and the backend (see ``task``).
    """
    inputs, outputs = tensors_of(task)
    folder, profile = Path(task["folder"]), Profile.from_json(task["profile"])
    onnx, target, any_weights = folder / task["onnx"], task["target"], task["any_weights"]
    request = BuildRequest(onnx, inputs, outputs, profile, folder, target, any_weights, task["options"])
    started = time.perf_counter()
    files = backend_of(task).build(request, progress)
    return {"files": list(files), "seconds": {"build": time.perf_counter() - started}}


def compile_network(task: Task, progress: Progress) -> dict:
    """Let a backend that runs live weights compile the network.

    The task has the network and the backend (see ``task``), the ``device`` (``cuda`` or ``cpu``) and the names of files
    that are ``known``. It may have the number of ``helpers`` that there is room for.
    """
    progress("starting the compiler", 0.0)
    import_comfyui(task["comfyui"])
    import torch

    from .helpers import helpers

    inputs, outputs = tensors_of(task)
    device, folder = torch.device(task["device"]), Path(task["folder"])
    symbols = symbols_in(inputs)
    free = {symbol: served for symbol, served in architecture_of(task).free.items() if symbol in symbols}
    function = function_of(task, "meta")[0]
    known = [(folder / name).read_bytes() for name in task["known"]]
    order = LiveTask(inputs, outputs, task["precision"], device, folder, free, known, task["calls_attention"],
                     task.get("helpers", 0), helpers)  # fmt: skip
    return backend_of(task).compile(function, order, progress)


STEPS = {"export": export, "build": build, "compile": compile_network, "check": check_engine}
