"""Limits of a build's steps: the time that they may take together, and memory and sizes of those that run on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from ..architectures import Architecture
from ..architectures.calls import Call
from ..backends import Progress
from ..engine_library import BuildError
from .resources import available_bytes
from .worker.task import Task
from .worker_process import Log
from .worker_tasks import Runner

CPU_ELEMENTS = 2 * 64 * 64
"""Elements of latents, or tokens, of a call that a CPU bears: attention takes memory by the square of an image's."""
SHARE = 0.9
"""Of the available main memory, for a step; the rest is for the server."""


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


def on_cpu(architecture: Architecture, calls: Sequence[Call], otherwise: Call) -> list[Call]:
    """Return those of some calls that a CPU bears, or another one where it bears none."""

    def elements(call: Call) -> int:
        told = {name for name, symbol in architecture.symbols.items() if symbol.of_picture}
        return math.prod(size for name, size in call.items() if name in told)

    return [call for call in calls if elements(call) <= CPU_ELEMENTS] or [otherwise]
