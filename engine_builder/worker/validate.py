"""The step that compares an engine with native: in the child process, on the engine's own device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...backends import Progress
from ...comfy_model.comfyui_shims import import_comfyui
from ...engine_library import BuildError, Engine, Manifest, Reason, Unavailable, ValidationFailed, measurements
from ...engine_library.gpu import driver_version
from .task import Task, backend_of, function_of, tensors_of

if TYPE_CHECKING:
    import torch

    from ...sessions.session import Runner
    from .parity import Case

log = logging.getLogger(__name__)

SCALED = 0.1
"""Largest relative change of weights for engines of any weights, each weight by another factor."""


def check_engine(task: Task, progress: Progress) -> dict:
    """Open an engine and compare it with native at the least, best and largest sizes that it accepts; time both.

    An engine of any weights is compared with other weights than it was built with. If it has weights when it is
    opened, it is compared with these first, then with half of them replaced, as LoRAs do, then with all.

    The task has ``engine`` (its folder), ``manifest``, ``device`` (``cuda`` or ``cpu``), ``limit``, the sizes of
    ``extremes`` and the ``timed`` size on a GPU, ``origin`` and ``advice`` (which engine it is and what to do when
    it fails, in words), the network and the backend (see ``task``).

    Raises:
        ValidationFailed: it differs from native by more than the limit, or cannot be opened or run.
        Unavailable: this machine lacks memory for a comparison.
        OSError: the comparison could not be made, which says nothing of the engine.
    """
    progress("timing the normal model", 0.0)
    import_comfyui(task["comfyui"])
    import torch

    from ...sessions.gpu_memory import is_out_of_memory
    from .parity import compare

    engine = Engine(Path(task["engine"]), Manifest.from_json(task["manifest"]))
    if tensors_of(task) != (engine.manifest.inputs, engine.manifest.outputs):
        raise _refused(task, "has other inputs and outputs than this network")
    device = torch.device(task["device"])
    started = time.perf_counter()
    try:
        stages = _native(task, engine, device, progress)
        compared = time.perf_counter()
        progress("comparing with the normal model", 0.6)
        runner, record, refit_s = backend_of(task).load(engine, device), [], 0.0
        for stage in stages:
            if stage.changed:
                began = time.perf_counter()
                runner.refit(stage.weights, stage.changed)
                refit_s += time.perf_counter() - began
            record += compare(runner, stage.cases, engine.manifest.outputs, task["limit"], task["limit"])
        native_ms = stages[0].native_ms
        engine_ms = _engine_milliseconds(runner, _timed(task, stages[0].cases), engine) if native_ms else None
    except (BuildError, Unavailable, OSError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise Unavailable(
                Reason.UNCHECKED,
                f"there is not enough memory to compare {engine.folder.name} with the normal model now",
            ) from error
        log.exception("%s failed", engine.folder.name)
        text = (str(error).strip().splitlines() or [""])[0]
        raise _refused(task, f"could not be run ({type(error).__name__}: {text})") from error
    if over := measurements.over_limit(record):
        raise _refused(
            task,
            f"differs from the normal model by {over['rel_err']:.2e} in {over['worst_output']} at {over['symbols']} "
            f"({measurements.limit_words(over, task['precision'])})",
        )
    where = "on the CPU" if device.type == "cpu" else "on the same device"
    exact = task["precision"] == "float32" or all("native_rel_err" in case for case in record)
    against = f"native{' in float32' if exact else ''} {where}"
    parity = {**measurements.worst_case(record), "cases": record, "against": against}
    if native_ms:
        parity["driver"] = driver_version()
        parity |= {"native_ms": round(native_ms, 3), "engine_ms": round(engine_ms, 3)}
    if refit_s:
        parity["refit_s"] = round(refit_s, 1)
    return {
        "parity": parity,
        "seconds": {"native": compared - started, "engine": time.perf_counter() - compared},
    }


def _refused(task: Task, why: str) -> ValidationFailed:
    return ValidationFailed(f"{task['origin']} {why}, so it is not used and the normal model runs; {task['advice']}")


@dataclass(frozen=True)
class _Stage:
    """Results of native with some weights.

    Attributes:
        changed: the initialisers whose weights differ from the stage before.
        weights: all weights of this stage by initialiser, for engines of any weights.
        native_ms: milliseconds of a native call, on a GPU.
    """

    changed: list[str]
    cases: list[Case]
    weights: dict[str, torch.Tensor]
    native_ms: float | None


def _native(task: Task, engine: Engine, device: torch.device, progress: Progress) -> list[_Stage]:
    """Run native with the weights of each stage; its memory on the device is free afterwards."""
    changes, changed, stages = _changes(engine, backend_of(task).keeps_weights), set(), []
    for change in changes:
        changed |= set(change)
        function, module = function_of(task)
        weights = _weights(engine, module, changed) if changed else {}

        def so_far(fraction: float) -> None:
            progress("timing the normal model", 0.6 * (len(stages) + fraction) / len(changes))

        cases, native_ms = _computed(task, function.to(device), device, so_far)
        stages.append(_Stage(change, cases, weights, native_ms))
    return stages


def _changes(engine: Engine, keeps_weights: bool) -> list[list[str]]:
    """Return the initialisers that get other weights, stage by stage."""
    if not engine.manifest.identity.any_weights:
        return [[]]
    names = sorted(engine.read_parameters().values())
    return [[], names[::2], names[1::2]] if keeps_weights else [names]


def _weights(engine: Engine, module: torch.nn.Module, changed: set[str]) -> dict[str, torch.Tensor]:
    """Scale each changed parameter of a network by its own factor; return all of them by their initialisers' names."""
    import torch

    generator = torch.Generator().manual_seed(7)
    parameters = {name: parameter.data for name, parameter in module.named_parameters()}
    initialisers = engine.read_parameters()
    for name, initialiser in initialisers.items():
        factor = float(1 + SCALED * (2 * torch.rand((), generator=generator) - 1))
        if initialiser in changed:
            parameters[name] *= factor
    return {initialiser: parameters[name] for name, initialiser in initialisers.items()}


def _computed(
    task: Task, function: torch.nn.Module, device: torch.device, so_far: Callable[[float], None]
) -> tuple[list[Case], float | None]:
    """The cases of a function, and on a GPU the milliseconds of a call.

    Each size has a case near the start of sampling, with random residuals, and a case near its end, without residuals.
    """
    import torch

    from ...architectures.shapes import SAMPLING_ENDS, sample_inputs
    from ...comfy_model import torch_kernels
    from ...comfy_model.torch_kernels import best_attention
    from .parity import native_case

    inputs, _ = tensors_of(task)
    cases, native_ms = [], None
    calls = [(sizes, end) for sizes in task["extremes"] for end in (0, 1)]
    with torch.inference_mode(), best_attention(device):
        for seed, (sizes, end) in enumerate(calls, start=1):
            so_far(seed / len(calls))
            given, symbols = sample_inputs(inputs, sizes, seed), dict(sizes)
            for spec in inputs:
                if spec.sample in SAMPLING_ENDS:
                    symbols["t"] = SAMPLING_ENDS[spec.sample][end]
                    given[spec.name].fill_(symbols["t"])
                elif spec.optional and end == 1:
                    given[spec.name].zero_()
            cases.append(native_case(function, symbols, given, device))
            if native_ms is None and sizes == task["timed"]:
                tensors = [tensor.to(device) for tensor in given.values()]
                native_ms = torch_kernels.milliseconds(lambda tensors=tensors: function(*tensors))
    return cases, native_ms


def _timed(task: Task, cases: list[Case]) -> Case:
    return next(case for case in cases if task["timed"].items() <= case.symbols.items())


def _engine_milliseconds(runner: Runner, case: Case, engine: Engine) -> float:
    """Time a call as a prompt makes it: by a CUDA graph where the backend allows it."""
    import torch

    from ...comfy_model import torch_kernels
    from ...sessions.cuda_graphs import GraphCache

    def on(runner: Runner) -> Callable[[dict], dict]:
        def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            results = {
                s.name: torch.empty(s.shape(case.symbols), dtype=getattr(torch, s.dtype), device=runner.device)
                for s in engine.manifest.outputs
            }
            runner.run(inputs, results)
            return results

        return run

    given = {name: tensor.to(runner.device) for name, tensor in case.given.items()}
    if not runner.capturable:
        return torch_kernels.milliseconds(lambda: on(runner)(given))
    graphs = GraphCache(runner.device)
    return torch_kernels.milliseconds(lambda: graphs.run(on(runner), given, own=lambda: on(runner.new_context())))
