"""Limits of a build's steps: their total time, their memory, and sizes of calls on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..architectures import Architecture
from ..architectures.calls import Call, serves_every_size
from ..backends import Progress
from ..engine_library import BuildError
from .order import BuildOrder
from .resources import available_bytes
from .worker.task import Task
from .worker_process import Log
from .worker_tasks import Runner

CPU_ELEMENTS = 2 * 64 * 64
"""Most elements of latents, or tokens, of a call on a CPU: attention's memory grows by their square."""
SHARE = 0.9
"""Share of the available main memory for a step; the rest is for the server."""


BLOCK_ROOM = 4e9
"""Bytes on the GPU that a build of blocks needs: CUDA's own, a block, also in float32, and its results."""

WAITED = "waited"
"""Key in a task's result: seconds before it began."""

MakeRoom = Callable[[torch.device, Callable[[str], None]], None]
"""Frees a GPU for a build, waiting if needed. Calls the given function with a phase; that may raise to cancel."""


class TimeLimit:
    """Limit on the total time of a build's steps; waits between them do not count."""

    def __init__(self, minutes: float, backend: str) -> None:
        """``minutes``: 0 is no limit."""
        self._minutes, self._backend, self._taken = minutes, backend, 0.0

    def kept_by(self, run: Runner) -> Runner:
        """Return a runner that ends a step once the time is over."""

        def run_in_time(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
            began = time.perf_counter()

            def progress_in_time(phase: str, fraction: float) -> None:
                if self._minutes and self._taken + time.perf_counter() - began > 60 * self._minutes:
                    raise BuildError(
                        f"the build with {self._backend} took longer than the {self._minutes:g} minutes that the "
                        "settings allow, so it was ended and the normal model keeps running; raise that limit in "
                        "Settings > Hybrid TRT, or choose fewer sizes on the engine node"
                    )
                progress(phase, fraction)

            try:
                return run(task, progress_in_time, log_line, environment)
            finally:
                self._taken += time.perf_counter() - began

        return run_in_time


def within_memory(run: Runner) -> Runner:
    """Return a runner whose steps on a CPU fail when main memory is short: else Linux would kill a process."""

    def run_within_memory(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
        if task["step"] == "export" or (task["step"], task.get("device")) == ("check", "cpu"):
            task = {**task, "memory": int(SHARE * available_bytes())}
        return run(task, progress, log_line, environment)

    return run_within_memory


def on_cpu(architecture: Architecture, calls: Sequence[Call], otherwise: Call) -> list[Call]:
    """Return the calls small enough for a CPU, or ``[otherwise]``."""

    def elements(call: Call) -> int:
        of_picture = {name for name, symbol in architecture.symbols.items() if symbol.of_picture}
        return math.prod(size for name, size in call.items() if name in of_picture)

    return [call for call in calls if elements(call) <= CPU_ELEMENTS] or [otherwise]


def in_blocks(order: BuildOrder) -> bool:
    """Tell whether an order is for live weights and a network in blocks, which is compiled without its weights."""
    return order.backend.runs_live_weights and serves_every_size(order.network.architecture())


def with_room(run: Runner, order: BuildOrder, make_room: MakeRoom) -> Runner:
    """Return a runner that has the GPU freed before steps that need it; blocks are compiled beside loaded models."""
    device = order.target_device

    def run_with_room(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
        on_gpu = {"export": False, "check": True}.get(task["step"], order.backend.builds_on_gpu)
        if not on_gpu or device.type != "cuda":
            return {**run(task, progress, log_line, environment), WAITED: 0.0}
        if in_blocks(order) and torch.cuda.mem_get_info(device)[0] >= BLOCK_ROOM:
            try:
                return {**run(task, progress, log_line, environment), WAITED: 0.0}
            except BuildError as failure:  # a prompt beside it may have taken the memory
                log_line(f"beside what is loaded: {failure}; now with the GPU's memory to itself")
        began = time.perf_counter()
        make_room(device, lambda phase: progress(phase, 0.0))
        waited = time.perf_counter() - began
        return {**run(task, progress, log_line, environment), WAITED: waited}

    return run_with_room
