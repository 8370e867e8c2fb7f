"""The step of a build that compiles a network: in the child process, on the device itself.

The network has no weights here: it only tells how its blocks are called. A block of each kind gets random ones while it
is compiled and compared. So a build needs little memory, and does not disturb a prompt that runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import torch

from ...comfy_model.torch_kernels import usual_attention
from ...engine_library import BuildError, measurements
from .. import LiveTask, Progress
from . import attention
from .comparison import against, compared, figures
from .compile_kinds import (
    Alike,
    BlockFunction,
    compile_alone,
    compile_apart,
    contents_of,
    kinds_of,
    packed,
    with_weights,
)
from .compiled import Compiled, cpu_kind, file_name, lifted
from .kinds import Kind, Layout, layout_of
from .opened_files import kinds_in, open_one

log = logging.getLogger(__name__)

FEW = 4
"""New kinds that this process compiles by itself: a helper takes seconds to start."""
MORE = 8
"""Blocks are also compared at sizes that are larger by one part in so many."""


def compile_blocks(function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
    """Compile each kind of a network's blocks, for any size, and compare each with the block run plainly.

    What an engine of the task's ``known`` has for a kind is taken from there.

    Args:
        function: the network, on the meta device.

    Returns:
        ``files``, ``seconds`` and ``parity``, as a manifest has them.

    Raises:
        BuildError: Inductor failed, or what it made differs from the block run plainly.
    """
    progress("preparing", 0.0)
    found, of = kinds_of(function, [_on_meta(task, sizes) for sizes in _cases(task)])
    layout = layout_of(function.blocks)
    known = {kind.key: kind for contents in task.known for kind in kinds_in(contents)}
    record: list[dict] = []
    taken = {"native_ms": 0.0, "engine_ms": 0.0}
    started = time.perf_counter()
    chosen = [_attention(alike, task, layout) for alike in found]
    keys = [f"{alike.key} {kernel}" for alike, (kernel, _) in zip(found, chosen, strict=True)]
    with _compiler(task, sum(key not in known for key in keys)) as compiler:
        begun = [partial(known.get, key) if key in known else
                 compiler(alike, kernel, task.device, layout, task.calls_attention)
                 for key, alike, (kernel, _) in zip(keys, found, chosen, strict=True)]  # fmt: skip
        made: list[Kind] = []
        for result in begun:
            progress(f"compiling part {len(made) + 1} of {len(found)}", 0.05 + 0.6 * len(made) / len(found))
            with _inductors_failures():
                made.append(result())
    compiled = time.perf_counter()
    for number, (alike, kind, (kernel, timed)) in enumerate(zip(found, made, chosen, strict=True)):
        progress(f"comparing part {number + 1} of {len(found)} with the normal model", 0.65 + 0.3 * number / len(found))
        more = {"attention": kernel, "attention_ms": timed} if timed else {}
        with with_weights(alike.block, task.device):
            run = partial(open_one(kind.contents), *lifted(alike.block).values())
            record += [{"kind": number, **one, **more} for one in _compared(alike, kind, run, task, layout)]
            if task.device.type == "cuda" and alike.usual:
                block, inputs = BlockFunction(alike.block, alike.calls[0].form), alike.drawn(task.device, layout)
                for name, value in figures(block, run, inputs).items():
                    taken[name] = value if name == "driver" else taken[name] + value * alike.usual
    seconds = {"compile": compiled - started, "compare": time.perf_counter() - compiled}
    name = file_name(task.free)
    (task.folder / name).write_bytes(contents_of(of, made))
    about = {"cpu": cpu_kind()} if task.device.type == "cpu" else _speed(taken)
    parity = {**measurements.worst_case(record), "cases": record, "against": against(record), **about}
    return {"files": [name], "seconds": seconds, "parity": parity}


@contextmanager
def _inductors_failures() -> Iterator[None]:
    """Raise what Inductor raises as BuildError."""
    try:
        yield
    except BuildError:
        raise
    except Exception as error:
        log.exception("Inductor failed")
        text = (str(error).strip().splitlines() or [""])[0]
        raise BuildError(
            f"torch could not compile this model ({type(error).__name__}: {text}), so no engine was made and "
            "the normal model keeps running; the build's log has more"
        ) from error


def _speed(taken: Mapping) -> dict:
    """The figures of all blocks together: the part of native's time. Milliseconds of a whole call are not known."""
    if not taken["native_ms"]:
        return {}
    return {"driver": taken["driver"], "relative_time": round(taken["engine_ms"] / taken["native_ms"], 4)}


def _cases(task: LiveTask) -> list[dict[str, int]]:
    """The calls that tell which sizes of a block are free: the usual one, the least and a larger one.

    The same again with each choice of what a call may go without.
    """
    free = task.free
    usual = {symbol: served.opt for symbol, served in free.items()}
    least = {symbol: max(1, served.min) for symbol, served in free.items()}
    more = {symbol: min(served.opt + max(1, served.opt // MORE), served.max) for symbol, served in free.items()}
    optional = [symbol for symbol, served in free.items() if served.min == 0]
    choices = [dict.fromkeys(left_out, 0) for count in range(len(optional) + 1)
               for left_out in combinations(optional, count)]  # fmt: skip
    return [{**case, **without} for without in choices for case in (usual, least, more)]


def _on_meta(task: LiveTask, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    return [torch.empty(spec.shape(sizes), dtype=getattr(torch, spec.dtype), device="meta") for spec in task.inputs]


def _attention(alike: Alike, task: LiveTask, layout: Layout) -> tuple[str | None, dict[str, float]]:
    """The kernel for a kind's attention, and the milliseconds it was chosen by; see ``attention.choose``."""
    if task.calls_attention or not attention.is_timed(task.device):
        return None if task.calls_attention else usual_attention(task.device), {}
    with with_weights(alike.block, task.device):
        return attention.choose(BlockFunction(alike.block, alike.calls[0].form), alike.drawn(task.device, layout))


@contextmanager
def _compiler(task: LiveTask, count: int) -> Iterator[Callable[..., Callable[[], Kind]]]:
    """Inside, kinds are compiled: by helpers beside each other, where there are many and the machine has room.

    Yields a function with the arguments of ``compile_alone``, which returns what gives the kind.
    """
    if count <= FEW or not task.most_helpers:
        yield lambda *given: partial(compile_alone, *given)
        return
    with task.helpers(min(count, task.most_helpers)) as submit:

        def begin(*given: Any) -> Callable[[], Kind]:
            return partial(_result, submit(compile_apart, *packed(*given)), given)

        yield begin


def _result(begun: Future[Kind], given: tuple) -> Kind:
    """The kind that a helper compiles; where that fails, this process does it."""
    try:
        return begun.result()
    except Exception as error:
        log.warning("a helper failed, so this process compiles the kind (%s)", error)
        return compile_alone(*given)


def _compared(alike: Alike, kind: Kind, run: Compiled, task: LiveTask, layout: Layout) -> Iterator[dict[str, float]]:
    """The figures of a kind for each size that it was found with; BuildError where one is over its limit."""
    for call in alike.calls:
        given = call.drawn(task.device, layout)
        if not kind.serves(kind.called, given):  # such calls run plainly
            continue
        with torch.inference_mode():
            results = run(*given)
        names = [f"result {i}" for i in range(len(results))]
        sizes: Sequence[tuple[int, ...]] = [tuple(tensor.shape) for tensor in given]
        yield compared(BlockFunction(alike.block, call.form), given, results, names, sizes, task.precision)
