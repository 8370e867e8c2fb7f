"""The step of a build that compiles a network: in the child process, on the device itself."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...architectures.shapes import TensorSpec, sample_inputs
from ...comfy_model.torch_kernels import best_attention, empty_laid_out, laid_out
from ...engine_library import BuildError
from ...engine_library.engine import relative_error
from ...sessions import gpu_timing
from ...sessions.cuda_graphs import GraphCache
from .. import LiveTask, Progress
from . import attention, benchmarks
from .compiled import Compiled, compile_to_file, file_name, open_file
from .shared_size import SharedSize

log = logging.getLogger(__name__)

LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative error of any output against the same network run plainly in the same precision."""

OBJECTS = 20_000
"""New ones between two searches for garbage, of which Inductor makes little; with Python's 700 it took 6 % longer."""


def compile_network(function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
    """Compile a network for each of the task's sizes, and compare what came out with the network run plainly.

    Weights are inputs of what is compiled, so only their shapes and memory layout count; these make the comparison one
    of real values. Compiling itself leaves the GPU alone, so siblings go on with it while another one has its turn.

    Returns:
        ``files``, ``seconds`` and ``parity``, as a manifest has them; ``seconds`` alone for any part but the first.

    Raises:
        BuildError: Inductor failed, or what it made differs from the network run plainly.
    """
    turns = task.turns
    _use_processors(turns.processors)
    if not task.leads:
        return _compile_part(function, task, progress)
    with turns.taken():
        for parameter in function.parameters():
            parameter.data = laid_out(parameter.data)
    names = sorted(name for name, _ in function.named_parameters())
    weights = [function.get_parameter(name).data for name in names]

    late = [i for i, spec in enumerate(task.inputs) if spec.late]
    seconds, record, first = {}, [], []
    for i, sizes in enumerate(task.sizes):
        progress(f"compiling for batch {sizes.get('B', 1)}", 0.05 + 0.95 * i / len(task.sizes))
        name = file_name(sizes)
        started = time.perf_counter()
        with turns.taken():
            given = [laid_out(t.to(task.device)) for t in sample_inputs(task.inputs, sizes, seed=1).values()]
            kernel, timed = attention.choose(function, given, turns.lock is not None)
        first = first or given
        compiled = _compiled(task, (function, weights, names, given), task.folder / name, kernel, late)
        seconds[f"compile_{Path(name).stem}"] = time.perf_counter() - started
        progress(f"comparing batch {sizes.get('B', 1)} with native", 0.05 + 0.95 * (i + 0.8) / len(task.sizes))
        with turns.taken():  # its first call chooses between configurations of kernels
            with torch.inference_mode():
                results = compiled(*weights, *given)
            error = _error(function, given, results, task.outputs, sizes, task.precision)
        record.append({**sizes, "rel_err": error, **({"attention": kernel, "attention_ms": timed} if timed else {})})
        del results, given  # siblings may need the memory
        opened = compiled if len(task.sizes) == 1 else None
        del compiled
    figures = _figures_alone(function, task, weights, first, opened, progress)
    return {
        "files": [file_name(sizes) for sizes in task.sizes],
        "seconds": seconds,
        "parity": {"rel_err": max(case["rel_err"] for case in record), "limit": LIMITS[task.precision],
                   "cases": record, "against": "the same weights run plainly on the same device", **figures},
    }  # fmt: skip


def _compile_part(function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
    """Compile a part, in any process but the first: tensors without memory stand for all inputs."""
    (sizes,) = task.sizes
    progress(f"compiling for batch {sizes.get('B', 1)}", 0.05)
    started, name = time.perf_counter(), file_name(sizes)
    names = sorted(name for name, _ in function.named_parameters())
    parameters = [function.get_parameter(name) for name in names]
    with FakeTensorMode():
        weights = [empty_laid_out(p.shape, p.dtype, task.device) for p in parameters]
        given = [empty_laid_out(s.shape(sizes), getattr(torch, s.dtype), task.device) for s in task.inputs]
    late = [i for i, spec in enumerate(task.inputs) if spec.late]
    _compiled(task, (function, weights, names, given), task.folder / name, None, late)
    return {"files": [], "seconds": {f"compile_{Path(name).stem}": time.perf_counter() - started}, "parity": {}}


def _compiled(
    task: LiveTask, network: tuple, path: Path, kernel: str | None, late: Sequence[int]
) -> Compiled | None:
    """One size, or this process's part of it; None for any part but the first, which puts all together.

    Args:
        network: the first four arguments of ``compile_to_file``.

    Raises:
        BuildError: Inductor failed.
    """
    try:
        with benchmarks.in_turn(task.turns), _few_searches_for_garbage():
            if task.part[1] == 1:
                return compile_to_file(*network, path, kernel, late)
            shared = SharedSize(path, *task.part)
            return shared.compile(*network, shared.agreed(kernel), late)
    except Exception as error:
        log.exception("Inductor failed")
        text = (str(error).strip().splitlines() or [""])[0]
        raise BuildError(
            f"Inductor could not compile the network ({type(error).__name__}: {text}), so no engine was made and "
            "native keeps serving; the build's log has more"
        ) from error


@contextmanager
def _few_searches_for_garbage() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _use_processors(count: int) -> None:
    """Have Inductor start no more compilers than ``count``; 0 leaves it as it is. Its pool has not started yet."""
    if count:
        from torch._inductor import config

        config.compile_threads = max(1, min(config.compile_threads or count, count))


def _figures_alone(
    function: torch.nn.Module, task: LiveTask, weights: list, given: list, opened: Compiled | None, progress: Progress
) -> dict[str, str | float]:
    """``_figures`` of the first size, once no sibling takes the GPU's or the host's time any more.

    Args:
        opened: what was compiled for it; None when its file is to be opened again.
    """
    if task.device.type != "cuda" or not task.turns.measures:
        return {}
    task.turns.wait_for_siblings(progress)
    progress("measuring", 0.97)
    return _figures(function, opened or task.folder / file_name(task.sizes[0]), weights, given)


def _figures(function: torch.nn.Module, compiled: Compiled | Path, weights: list, given: list) -> dict:
    """Milliseconds of a call, plain and as a prompt makes it; none where they cannot be taken: no engine needs them."""
    graphs = GraphCache(given[0].device)
    names = [str(i) for i in range(len(given))]
    try:
        compiled = open_file(compiled) if isinstance(compiled, Path) else compiled

        def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            results = compiled(*weights, *(tensors[name] for name in names))
            return {str(i): result for i, result in enumerate(results)}

        with torch.inference_mode(), best_attention(given[0].device):
            native = gpu_timing.milliseconds(lambda: function(*given))
            engine = gpu_timing.milliseconds(lambda: graphs.run(run, dict(zip(names, given, strict=True))))
    except Exception:
        log.warning("what a call takes was not measured", exc_info=True)
        return {}
    return {"driver": gpu_timing.driver_version(), "native_ms": round(native, 3), "engine_ms": round(engine, 3)}


def _error(
    function: torch.nn.Module, given: list, results: tuple, outputs: Sequence[TensorSpec], sizes: dict, precision: str
) -> float:
    """The largest relative error of any output; BuildError when it is over the limit."""
    with torch.inference_mode(), best_attention(given[0].device):
        expected = function(*given)
    errors = {s.name: relative_error(r, e) for s, r, e in zip(outputs, results, expected, strict=True)}
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= LIMITS[precision]:
        raise BuildError(
            f"what Inductor compiled differs from native by {errors[worst]:.2e} in {worst} at {sizes} "
            f"(limit {LIMITS[precision]:.0e} for {precision}), so no engine was made and native keeps serving"
        )
    return errors[worst]
