"""The step of a build that compiles a network: in the child process, on the device itself."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ...architectures.shapes import TensorSpec, sample_inputs
from ...comfy_model.float32 import results_in_float32
from ...comfy_model.torch_kernels import best_attention, laid_out
from ...engine_library import BuildError, yardstick
from ...engine_library.engine import furthest
from ...engine_library.gpu_driver import driver_version
from ...sessions import gpu_timing
from ...sessions.cuda_graphs import GraphCache
from .. import LiveTask, Progress
from . import attention, quantised_graph
from .compile_kinds import compile_kinds
from .compiled import Compiled, compile_in_parts, compile_to_file, file_name, lifted
from .cpu import cpu_kind
from .kinds import InBlocks, Kinds
from .opened_files import open_file

log = logging.getLogger(__name__)

COMPILED_LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative error of any output against the same network run plainly, in the same precision on the same device.

In half precision it holds only where float32 cannot be had, see ``yardstick``. It is below ``engine.LIMITS``: the
kernels are torch's own, fused anew.
"""

MORE = 8
"""A file of free sizes is also tried with sizes that are larger by such a part than those that it was compiled with."""


def compile_network(function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
    """Compile a network for each of the task's sizes, and compare what came out with the network run plainly.

    Weights are inputs of what is compiled, so only their shapes and memory layout count; these make the comparison one
    of real values. Other processes compile parts, where there are some: see ``engine_builder.parallel``. Attention is
    timed before they begin. All else that is timed here is timed when they have nothing to do any more.

    Returns:
        ``files``, ``seconds`` and ``parity``, as a manifest has them.

    Raises:
        BuildError: Inductor failed, or what it made differs from the network run plainly.
    """
    task = replace(task, sizes=[_example(task, sizes) for sizes in task.sizes])
    for parameter in function.parameters():
        parameter.data = laid_out(parameter.data)
    tensors = lifted(function)
    names, weights = list(tensors), list(tensors.values())
    seconds, record = {}, []
    among = f" with {task.processes} processes" if task.submit else ""
    progress(f"compiling{among}", 0.05)
    started = time.perf_counter()
    chosen = [attention.choose(function, _inputs(task, sizes)) for sizes in task.sizes]
    with _told():
        begun = [_begin(task, function, weights, names, sizes, kernel)
                 for sizes, (kernel, _) in zip(task.sizes, chosen, strict=True)]  # fmt: skip
    for i, sizes in enumerate(task.sizes):
        progress(f"compiling{_batch(task, sizes, ' for batch ')}{among}", 0.05 + 0.8 * i / len(task.sizes))
        with _told():
            begun[i]()
        now = time.perf_counter()
        seconds[f"compile_{Path(_name(task, sizes)).stem}"], started = now - started, now
    first = None
    for i, (sizes, (kernel, timed)) in enumerate(zip(task.sizes, chosen, strict=True)):
        progress(f"comparing{_batch(task, sizes, ' batch ')} with the normal model", 0.85 + 0.12 * i / len(task.sizes))
        compiled = _runner(function, weights, open_file(task.folder / _name(task, sizes)))
        for case in _cases(task, sizes):
            given = _inputs(task, case)
            with torch.inference_mode():
                results = compiled(*given)
            found = _compared(function, given, results, task.outputs, case, task.precision)
            record.append({**case, **found, **({"attention": kernel, "attention_ms": timed} if timed else {})})
        first = first or compiled
        del results, given, compiled
    figures = {"cpu": cpu_kind()} if task.device.type == "cpu" else {}
    if task.device.type == "cuda":
        progress("measuring", 0.97)
        figures = _figures(function, first, _inputs(task, task.sizes[0]))
    seconds["compare"] = time.perf_counter() - started
    return {
        "files": [_name(task, sizes) for sizes in task.sizes],
        "seconds": seconds,
        "parity": {**yardstick.figures(record), "cases": record, "against": _against(record), **figures},
    }


def _example(task: LiveTask, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes that the file for some sizes is compiled with; no two that it leaves free are alike."""
    return {**sizes, **{symbol: task.free[symbol].opt for symbol in task.left_free(sizes)}}


def _name(task: LiveTask, sizes: dict[str, int]) -> str:
    return file_name(sizes, task.left_free(sizes))


def _cases(task: LiveTask, sizes: dict[str, int]) -> list[dict[str, int]]:
    """The calls to compare what was compiled for some sizes with native in; with other sizes where it leaves some free.

    Far below what it was compiled with, and above.
    """
    free = {symbol: task.free[symbol] for symbol in task.left_free(sizes)}
    if not free:
        return [sizes]
    least = {symbol: max(1, served.min) for symbol, served in free.items()}
    more = {symbol: min(sizes[symbol] + max(1, sizes[symbol] // MORE), served.max) for symbol, served in free.items()}
    without = {symbol: 0 for symbol, served in free.items() if served.min == 0}
    cases = [{**sizes, **changes} for changes in ({}, least, more)]
    return [*cases, *({**case, **without} for case in cases if without)]


def _batch(task: LiveTask, sizes: dict[str, int], word: str) -> str:
    """Words for the batch that a file is for; none where it leaves all sizes free."""
    whole = len(task.left_free(sizes)) < len(sizes)
    return f"{word}{next((spec.shape(sizes)[0] for spec in task.inputs), 1)}" if whole else ""


def _inputs(task: LiveTask, sizes: dict[str, int]) -> list[torch.Tensor]:
    """The same random inputs whenever it is asked for a size."""
    return [laid_out(tensor.to(task.device)) for tensor in sample_inputs(task.inputs, sizes, seed=1).values()]


def _begin(
    task: LiveTask, function: torch.nn.Module, weights: list, names: list[str], sizes: dict[str, int],
    kernel: str | None,
) -> Callable[[], object]:  # fmt: skip
    """Begin to compile a size and return what ends with its file: all of it where this process is alone."""
    path = task.folder / _name(task, sizes)
    if getattr(function, "blocks", None):
        calls = [_inputs(task, case) for case in _cases(task, sizes)]
        return lambda: path.write_bytes(compile_kinds(function, calls, kernel))
    late = [i for i, spec in enumerate(task.inputs) if spec.late]
    arguments = (function, weights, names), (path, kernel, late)
    if task.submit is not None:
        parts = max(1, task.processes // len(task.sizes))  # each costs some seconds of its own
        return compile_in_parts(task.submit, parts, *arguments[0], _inputs(task, sizes), *arguments[1])
    return lambda: compile_to_file(*arguments[0], _inputs(task, sizes), *arguments[1])


@contextmanager
def _told() -> Iterator[None]:
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


def _runner(function: torch.nn.Module, weights: Sequence[torch.Tensor], opened: Compiled | Kinds) -> Compiled:
    """A network's outputs for its inputs by what was compiled."""
    if isinstance(opened, Kinds):
        own = [list(lifted(block).values()) for block in function.blocks]
        return InBlocks(function, opened, lambda: own)
    return partial(opened, *weights)


def _figures(function: torch.nn.Module, compiled: Compiled, given: list) -> dict:
    """Milliseconds of a call, plain and as a prompt makes it; none where they cannot be taken: no engine needs them."""
    graphs = GraphCache(given[0].device)
    names = [str(i) for i in range(len(given))]
    try:
        def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            results = compiled(*(tensors[name] for name in names))
            return {str(i): result for i, result in enumerate(results)}

        with torch.inference_mode(), best_attention(given[0].device):
            native = gpu_timing.milliseconds(lambda: function(*given))
            engine = gpu_timing.milliseconds(lambda: graphs.run(run, dict(zip(names, given, strict=True))))
    except Exception:
        log.warning("what a call takes was not measured", exc_info=True)
        return {}
    return {"driver": driver_version(), "native_ms": round(native, 3), "engine_ms": round(engine, 3)}


def _compared(
    function: torch.nn.Module, given: list, results: tuple, outputs: Sequence[TensorSpec], sizes: dict, precision: str
) -> dict[str, float]:
    """Figures of the output with the largest relative error; BuildError when it is over its limit."""
    with torch.inference_mode(), best_attention(given[0].device):
        expected = function(*given)
    names, native = [spec.name for spec in outputs], None
    rounds = precision != "float32" or quantised_graph.has_quantised(function)
    exact = results_in_float32(function, given) if rounds else None
    if exact is not None:
        native = furthest(names, expected, exact)[1]
        if math.isfinite(native):
            expected = exact
    worst, error = furthest(names, results, expected)
    found = yardstick.judged(error, native, yardstick.FLOORS.get(precision, COMPILED_LIMITS[precision]),
                             COMPILED_LIMITS[precision])  # fmt: skip
    if yardstick.over_limit([found]):
        raise BuildError(
            f"what Inductor compiled differs from the normal model by {error:.2e} in {worst} at {sizes} "
            f"({yardstick.limit_words(found, precision)}), so no engine was made and the normal model keeps running"
        )
    return found


def _against(cases: Sequence[Mapping]) -> str:
    """The reference of all cases, in words."""
    plainly, exactly = "the same weights run plainly on the same device", "the same weights in float32, beside native"
    told = {exactly if "native_rel_err" in case else plainly for case in cases}
    return told.pop() if len(told) == 1 else f"{exactly}; where that took too much memory, {plainly}"
