"""The step of a build that compiles a whole network: in the child process, on the device itself."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from ...architectures.shapes import sample_inputs
from ...comfy_model import torch_kernels
from ...comfy_model.torch_kernels import best_attention, laid_out, results_in_float32
from ...engine_library import BuildError, measurements
from ...engine_library.engine import furthest
from ...engine_library.gpu import driver_version
from ...sessions.cuda_graphs import GraphCache
from .. import LiveTask, Progress
from . import attention, graph_passes
from .compiled import Compiled, compile_to_file, cpu_kind, file_name, lifted
from .opened_files import open_file

log = logging.getLogger(__name__)

COMPILED_LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative error of any output against the same network run plainly, in the same precision on the same device.

In half precision it holds only where float32 cannot be had, see ``measurements``. It is below ``engine.LIMITS``: the
kernels are torch's own, fused anew.
"""

def compile_network(function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
    """Compile a network for each of the task's sizes, and compare what came out with the network run plainly.

    Weights are inputs of what is compiled, so only their shapes and memory layout count; these make the comparison one
    of real values.

    Returns:
        ``files``, ``seconds`` and ``parity``, as a manifest has them.

    Raises:
        BuildError: Inductor failed, or what it made differs from the network run plainly.
    """
    for parameter in function.parameters():
        parameter.data = laid_out(parameter.data)
    tensors = lifted(function)
    names, weights, names_out = list(tensors), list(tensors.values()), [spec.name for spec in task.outputs]
    seconds, record = {}, []
    progress("compiling", 0.05)
    started = time.perf_counter()
    chosen = [attention.choose(function, _inputs(task, sizes)) for sizes in task.sizes]
    for i, sizes in enumerate(task.sizes):
        progress(f"compiling{_batch(task, sizes, ' for batch ')}", 0.05 + 0.8 * i / len(task.sizes))
        with inductors_failures():
            path = task.folder / file_name(sizes)
            compile_to_file(function, weights, names, _inputs(task, sizes), path, chosen[i][0])
        now = time.perf_counter()
        seconds[f"compile_{Path(file_name(sizes)).stem}"], started = now - started, now
    first = None
    for i, (sizes, (kernel, timed)) in enumerate(zip(task.sizes, chosen, strict=True)):
        progress(f"comparing{_batch(task, sizes, ' batch ')} with the normal model", 0.85 + 0.12 * i / len(task.sizes))
        compiled = partial(open_file(task.folder / file_name(sizes)), *weights)
        given = _inputs(task, sizes)
        with torch.inference_mode():
            results = compiled(*given)
        found = compared(function, given, results, names_out, sizes, task.precision)
        record.append({**sizes, **found, **({"attention": kernel, "attention_ms": timed} if timed else {})})
        first = first or compiled
        del results, given, compiled
    about = {"cpu": cpu_kind()} if task.device.type == "cpu" else {}
    if task.device.type == "cuda":
        progress("measuring", 0.97)
        about = figures(function, first, _inputs(task, task.sizes[0]))
    seconds["compare"] = time.perf_counter() - started
    return {
        "files": [file_name(sizes) for sizes in task.sizes],
        "seconds": seconds,
        "parity": {**measurements.worst_case(record), "cases": record, "against": against(record), **about},
    }


def _batch(task: LiveTask, sizes: dict[str, int], word: str) -> str:
    """Words for the batch that a file is for."""
    return f"{word}{next((spec.shape(sizes)[0] for spec in task.inputs), 1)}"


def _inputs(task: LiveTask, sizes: dict[str, int]) -> list[torch.Tensor]:
    """The same random inputs whenever it is asked for a size."""
    return [laid_out(tensor.to(task.device)) for tensor in sample_inputs(task.inputs, sizes, seed=1).values()]


@contextmanager
def inductors_failures() -> Iterator[None]:
    """Raise what Inductor raises as BuildError."""
    try:
        yield
    except Exception as error:
        log.exception("Inductor failed")
        text = (str(error).strip().splitlines() or [""])[0]
        raise BuildError(
            f"Inductor could not compile the network ({type(error).__name__}: {text}), so no engine was made and "
            "the normal model keeps running; the build's log has more"
        ) from error


def figures(function: torch.nn.Module, compiled: Compiled, given: list) -> dict:
    """Milliseconds of a call, plain and as a prompt makes it; none where they cannot be taken: no engine needs them."""
    graphs = GraphCache(given[0].device)
    names = [str(i) for i in range(len(given))]
    try:
        def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            results = compiled(*(tensors[name] for name in names))
            return {str(i): result for i, result in enumerate(results)}

        with torch.inference_mode(), best_attention(given[0].device):
            native = torch_kernels.milliseconds(lambda: function(*given))
            engine = torch_kernels.milliseconds(lambda: graphs.run(run, dict(zip(names, given, strict=True))))
    except Exception:
        log.warning("what a call takes was not measured", exc_info=True)
        return {}
    return {"driver": driver_version(), "native_ms": round(native, 3), "engine_ms": round(engine, 3)}


def compared(
    function: torch.nn.Module, given: list, results: Sequence[torch.Tensor], names: Sequence[str], sizes: object,
    precision: str,
) -> dict[str, float]:  # fmt: skip
    """Figures of the output with the largest relative error; BuildError when it is over its limit."""
    with torch.inference_mode(), best_attention(given[0].device):
        expected = function(*given)
    native = None
    rounds = precision != "float32" or graph_passes.has_quantised(function)
    exact = results_in_float32(function, given) if rounds else None
    if exact is not None:
        native = furthest(names, expected, exact)[1]
        if math.isfinite(native):
            expected = exact
    worst, error = furthest(names, results, expected)
    found = measurements.judged(error, native, measurements.FLOORS.get(precision, COMPILED_LIMITS[precision]),
                             COMPILED_LIMITS[precision])  # fmt: skip
    if measurements.over_limit([found]):
        raise BuildError(
            f"what Inductor compiled differs from the normal model by {error:.2e} in {worst} at {sizes} "
            f"({measurements.limit_words(found, precision)}), so no engine was made and the normal model keeps running"
        )
    return found


def against(cases: Sequence[Mapping]) -> str:
    """The reference of all cases, in words."""
    plainly, exactly = "the same weights run plainly on the same device", "the same weights in float32, beside native"
    found = {exactly if "native_rel_err" in case else plainly for case in cases}
    return found.pop() if len(found) == 1 else f"{exactly}; where that took too much memory, {plainly}"
