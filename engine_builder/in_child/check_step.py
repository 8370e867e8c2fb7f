"""The step that compares an engine from elsewhere with native: in the child process, on the engine's own device."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...backends import Progress
from ...engine_library import BuildError, Engine, Manifest, Reason, Unavailable
from ...native_model.comfyui_classes import import_comfyui
from .task import Task, backend_of, function_of, tensors_of

if TYPE_CHECKING:
    import torch

    from .parity import Case

log = logging.getLogger(__name__)

TIMESTEPS = (900.0, 50.0)
"""The first with random residuals, the second with none."""


def check_engine(task: Task, progress: Progress) -> dict:
    """Open an engine and compare it with native at the least, best and largest sizes that it accepts.

    The task has ``engine`` (its folder), ``manifest``, ``device`` (``cuda`` or ``cpu``), ``limit``, the sizes of
    ``extremes``, the network and the backend (see ``task``).

    Raises:
        BuildError: it differs from native by more than the limit, or cannot be opened or run.
        Unavailable: this machine has not the memory for a comparison.
    """
    progress("running native", 0.0)
    import_comfyui(task["comfyui"])
    import torch

    from .parity import compare

    engine = Engine(Path(task["engine"]), Manifest.from_json(task["manifest"]))
    if tensors_of(task) != (engine.manifest.inputs, engine.manifest.outputs):
        raise BuildError(
            f"{engine.folder.name}, which came from elsewhere, has other inputs and outputs than this network, so it "
            "does not serve and native does; build again to have an engine made here in its place"
        )
    device = torch.device(task["device"])
    started = time.perf_counter()
    try:
        cases = _native(task, device, progress)
        compared = time.perf_counter()
        progress("comparing with native", 0.6)
        record = compare(backend_of(task).load(engine, device), cases, engine.manifest.outputs)
    except torch.OutOfMemoryError as error:
        raise Unavailable(
            Reason.UNCHECKED, f"there is not enough GPU memory to compare {engine.folder.name} with native now"
        ) from error
    except (BuildError, Unavailable):
        raise
    except Exception as error:
        log.exception("%s failed", engine.folder.name)
        text = (str(error).strip().splitlines() or [""])[0]
        raise BuildError(
            f"{engine.folder.name}, which came from elsewhere, could not be run ({type(error).__name__}: {text}), so "
            "it does not serve and native does; build again to have an engine made here in its place"
        ) from error
    worst = max(record, key=lambda case: case["rel_err"])
    if not worst["rel_err"] <= task["limit"]:
        raise BuildError(
            f"{engine.folder.name}, which came from elsewhere, differs from native by {worst['rel_err']:.2e} in "
            f"{worst['worst_output']} at {worst['symbols']} (limit {task['limit']:.0e}), so it does not serve and "
            "native does; build again to have an engine made here in its place"
        )
    against = "native in float32 on the CPU" if device.type == "cpu" else "native on the same device"
    return {
        "parity": {"rel_err": worst["rel_err"], "limit": task["limit"], "cases": record, "against": against},
        "seconds": {"native": compared - started, "engine": time.perf_counter() - compared},
    }


def _native(task: Task, device: torch.device, progress: Progress) -> list[Case]:
    """What native computes; its memory is free again afterwards."""
    import torch

    from ...architectures.samples import sample_inputs
    from ...native_model.kernels import best_attention
    from .parity import Case, in_float32

    on_cpu = device.type == "cpu"
    inputs, _ = tensors_of(task)
    function, _ = function_of(task, device.type)
    cases = []
    calls = [(sizes, t) for sizes in task["extremes"] for t in TIMESTEPS]
    with torch.inference_mode(), in_float32(function) if on_cpu else contextlib.nullcontext(), best_attention(device):
        for seed, (sizes, timestep) in enumerate(calls, start=1):
            progress("running native", 0.6 * seed / len(calls))
            given = sample_inputs(inputs, sizes, seed)
            for spec in inputs:
                if spec.sample == "timestep":
                    given[spec.name].fill_(timestep)
                elif spec.optional and timestep == TIMESTEPS[1]:
                    given[spec.name].zero_()
            tensors = (t.float() if on_cpu else t.to(device) for t in given.values())
            expected = tuple(result.float().cpu() for result in function(*tensors))
            cases.append(Case({**sizes, "t": int(timestep)}, given, expected))
    return cases
