"""Limits of a build's steps: the time that they may take together, their memory, and sizes of those on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..architectures import Architecture
from ..architectures.calls import Call, serves_every_size
from ..backends import Progress
from ..engine_library import BuildError
from ..sessions.memory_words import says_out_of_memory
from .order import BuildOrder
from .resources import available_bytes
from .worker.task import Task
from .worker_process import Log
from .worker_tasks import Runner

CPU_ELEMENTS = 2 * 64 * 64
"""Elements of latents, or tokens, of a call that a CPU bears: attention takes memory by the square of an image's."""
SHARE = 0.9
"""Of the available main memory, for a step; the rest is for the server."""


BLOCK_ROOM = 4e9
"""Bytes on the GPU that a build of blocks needs: CUDA's own, a block, also in float32, and what it computes."""

WAITED = "waited"
"""In a task's result: seconds before it began."""

MakeRoom = Callable[[torch.device, Callable[[str], None]], None]
"""Frees a GPU for a build, waiting where it must. Calls what it is given with a phase; that may raise to cancel."""


class TimeLimit:
    """Time that all steps of a build may take together; what is waited for between them is not counted."""

    def __init__(self, minutes: float, backend: str) -> None:
        """``minutes``: 0 is no limit."""
        self._minutes, self._backend, self._taken = minutes, backend, 0.0

    def kept_by(self, run: Runner) -> Runner:
        """Return a runner that ends the step in which the time is over."""

        def run_in_time(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
            began = time.perf_counter()

            def watched(phase: str, fraction: float) -> None:
                if self._minutes and self._taken + time.perf_counter() - began > 60 * self._minutes:
                    raise BuildError(
                        f"the build with {self._backend} took longer than the {self._minutes:g} minutes that the "
                        "settings allow, so it was ended and the normal model keeps running; raise that limit in "
                        "Settings > Hybrid TRT, or choose fewer sizes on the engine node"
                    )
                progress(phase, fraction)

            try:
                return run(task, watched, log_line, environment)
            finally:
                self._taken += time.perf_counter() - began

        return run_in_time


def within_memory(run: Runner) -> Runner:
    """Return a runner whose steps on a CPU fail when main memory is short: else Linux would end some process."""

    def run_within_memory(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
        if task["step"] == "export" or (task["step"], task.get("device")) == ("check", "cpu"):
            task = {**task, "memory": int(SHARE * available_bytes())}
        return run(task, progress, log_line, environment)

    return run_within_memory


def on_cpu(architecture: Architecture, calls: Sequence[Call], least: Call) -> list[Call]:
    """Return calls that a CPU bears: they are halved where they are too large, and left out where that is too little.

    Args:
        least: no size is halved to below its own; it is returned where no call is left.
    """
    found: list[Call] = []
    for call in map(dict, calls):
        for symbol in architecture.halved:
            while _elements(architecture, call) > CPU_ELEMENTS and call.get(symbol, 1) // 2 >= least.get(symbol, 1):
                call[symbol] //= 2
        if _elements(architecture, call) <= CPU_ELEMENTS and call not in found:
            found.append(call)
    return found or [least]


def _elements(architecture: Architecture, call: Call) -> int:
    """Return the latent elements or tokens of a call's pictures. A step in pixels is one of them."""
    symbols = {name: symbol for name, symbol in architecture.symbols.items() if symbol.of_picture and name in call}
    return math.prod(call[name] * (1 if symbol.unit else symbol.step) for name, symbol in symbols.items())


def in_blocks(order: BuildOrder) -> bool:
    """Tell whether an order is for live weights and a network in blocks, which is compiled without its weights."""
    return order.backend.runs_live_weights and serves_every_size(order.network.architecture())


def with_room(run: Runner, order: BuildOrder, make_room: MakeRoom) -> Runner:
    """Return a runner that has the GPU freed before steps that need it; blocks are compiled beside what is loaded."""
    device = order.target_device

    def run_with_room(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
        on_gpu = {"export": False, "check": True}.get(task["step"], order.backend.builds_on_gpu)
        if not on_gpu or device.type != "cuda":
            return {**run(task, progress, log_line, environment), WAITED: 0.0}
        if in_blocks(order) and torch.cuda.mem_get_info(device)[0] >= BLOCK_ROOM:
            try:
                return {**run(task, progress, log_line, environment), WAITED: 0.0}
            except BuildError as failure:  # a prompt beside it may have taken the memory
                if not says_out_of_memory(failure):
                    raise
                log_line(f"beside what is loaded: {failure}; now with the GPU's memory to itself")
        began = time.perf_counter()
        make_room(device, lambda phase: progress(phase, 0.0))
        waited = time.perf_counter() - began
        return {**run(task, progress, log_line, environment), WAITED: waited}

    return run_with_room
