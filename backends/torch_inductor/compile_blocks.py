"""The step of a build that compiles a network in blocks: in the child process, on the device itself.

The network has no weights here: it only tells how its blocks are called. A block of each kind gets random ones while it
is compiled and compared. So a build needs little memory, and does not disturb a prompt that runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations

import torch

from ...comfy_model.snapshot import draw_weights
from ...comfy_model.torch_kernels import laid_out
from ...engine_library import measurements
from .. import LiveTask, Progress
from . import attention
from .compile_kinds import Alike, BlockFunction, Call, compiled, contents_of, kinds_of
from .compile_step import against, compared, figures, inductors_failures
from .compiled import Compiled, cpu_kind, file_name, lifted
from .kinds import Kind
from .opened_files import kinds_in, open_one

log = logging.getLogger(__name__)

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
    progress("finding the kinds of blocks", 0.0)
    found, of = kinds_of(function, [_on_meta(task, sizes) for sizes in _cases(task)])
    known = {kind.key: kind for contents in task.known for kind in kinds_in(contents)}
    made: list[Kind] = []
    record: list[dict] = []
    seconds, taken = {"compile": 0.0, "compare": 0.0}, {"native_ms": 0.0, "engine_ms": 0.0}
    for number, alike in enumerate(found):
        words = f"kind {number + 1} of {len(found)}"
        progress(f"compiling {words}", 0.05 + 0.9 * number / len(found))
        started = time.perf_counter()
        with _with_weights(alike.block, task.device):
            block, inputs = BlockFunction(alike.block, alike.calls[0].form), _inputs(alike.calls[0], task.device)
            kernel, timed = (None, {}) if task.calls_attention else attention.choose(block, inputs)
            with inductors_failures():
                kind = known.get(f"{alike.key} {kernel}") or compiled(alike, block, inputs, kernel)
            done = time.perf_counter()
            progress(f"comparing {words} with the normal model", 0.05 + 0.9 * (number + 0.8) / len(found))
            run = partial(open_one(kind.contents), *lifted(block).values())
            chosen = {"attention": kernel, "attention_ms": timed} if timed else {}
            record += [{"kind": number, **one, **chosen} for one in _compared(alike, run, task)]
            if task.device.type == "cuda" and alike.usual:
                for name, value in figures(block, run, inputs).items():
                    taken[name] = value * alike.usual + taken[name] if name in taken else value
        made.append(kind)
        seconds["compile"] += done - started
        seconds["compare"] += time.perf_counter() - done
    name = file_name(task.sizes[0], task.free)
    (task.folder / name).write_bytes(contents_of(of, made))
    about = {"cpu": cpu_kind()} if task.device.type == "cpu" else _speed(taken)
    parity = {**measurements.worst_case(record), "cases": record, "against": against(record), **about}
    return {"files": [name], "seconds": seconds, "parity": parity}


def _speed(taken: Mapping) -> dict:
    """The figures of all blocks together: the part of native's time. Milliseconds of a whole call are not known."""
    if not taken["native_ms"]:
        return {}
    return {"driver": taken["driver"], "relative_time": round(taken["engine_ms"] / taken["native_ms"], 4)}


def _cases(task: LiveTask) -> list[dict[str, int]]:
    """The calls that tell which sizes of a block are free: the usual one, the least and a larger one.

    The same again with each choice of what a call may go without.
    """
    usual = {symbol: served.opt for symbol, served in task.free.items() if symbol in task.sizes[0]}
    free = {symbol: task.free[symbol] for symbol in usual}
    least = {symbol: max(1, served.min) for symbol, served in free.items()}
    more = {symbol: min(served.opt + max(1, served.opt // MORE), served.max) for symbol, served in free.items()}
    optional = [symbol for symbol, served in free.items() if served.min == 0]
    choices = [dict.fromkeys(left_out, 0) for count in range(len(optional) + 1)
               for left_out in combinations(optional, count)]  # fmt: skip
    return [{**case, **without} for without in choices for case in (usual, least, more)]


def _on_meta(task: LiveTask, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    return [torch.empty(spec.shape(sizes), dtype=getattr(torch, spec.dtype), device="meta") for spec in task.inputs]


@contextmanager
def _with_weights(block: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a block has random weights on a device."""
    draw_weights(block, device)
    for parameter in block.parameters():
        parameter.data = laid_out(parameter.data)
    try:
        yield
    finally:
        block.to("meta")


def _inputs(call: Call, device: torch.device) -> list[torch.Tensor]:
    """Random inputs of a block; the same whenever it is asked for a call."""
    generator = torch.Generator(device).manual_seed(1)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        if not like.is_floating_point():
            return torch.ones(like.shape, dtype=like.dtype, device=device)
        return torch.randn(like.shape, generator=generator, dtype=torch.float32, device=device).to(like.dtype)

    return [drawn(tensor) for tensor in call.inputs]


def _compared(alike: Alike, run: Compiled, task: LiveTask) -> Iterator[dict[str, float]]:
    """The figures of a kind for each size that it was found with; BuildError where one is over its limit."""
    for call in alike.calls:
        given = _inputs(call, task.device)
        with torch.inference_mode():
            results = run(*given)
        names = [f"result {i}" for i in range(len(results))]
        sizes: Sequence[tuple[int, ...]] = [tuple(tensor.shape) for tensor in given]
        yield compared(BlockFunction(alike.block, call.form), given, results, names, sizes, task.precision)
