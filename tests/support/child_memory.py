"""Cost of a build's worker processes: seconds, processor seconds and memory, step by step."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from hybrid_trt.backends import Progress
from hybrid_trt.engine_builder.worker_process import Log, run_in_worker

SAMPLE_SECONDS = 0.05


class PeakMemory:
    """The most memory that the children of this process have together while the block lasts, in bytes.

    Attributes:
        resident: all that is in memory, files that are mapped included.
        private: without files, whose pages give way when memory is wanted.
    """

    def __enter__(self) -> PeakMemory:
        self.resident = self.private = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            found = [_sizes(child.pid) for child in psutil.Process().children(recursive=True)]
            self.resident = max(self.resident, sum(size["VmRSS"] for size in found))
            self.private = max(self.private, sum(size["RssAnon"] for size in found))
            if len(found) == 1:  # the kernel keeps the highest value, so only the last moments can be missed
                self.resident = max(self.resident, found[0]["VmHWM"])


class Measured:
    """Does a build's steps in child processes, as the pack does, and keeps what each took."""

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, float]] = {}

    def __call__(self, task: Mapping, progress: Progress, log: Log, environment: Mapping[str, str]) -> dict:
        before, started = _processor_seconds(), time.perf_counter()
        with PeakMemory() as memory:
            result = run_in_worker(task, progress, log, environment)
        self.steps[task["step"]] = {
            "wall_s": round(time.perf_counter() - started, 1),
            "processor_s": round(_processor_seconds() - before, 1),
            "peak_gb": round(memory.resident / 1e9, 2),
            "of_that_private_gb": round(memory.private / 1e9, 2),
        }
        return result


def _sizes(pid: int) -> dict[str, int]:
    """Linux's figures of a process in bytes; zeros when it has ended."""
    sizes = dict.fromkeys(("VmRSS", "VmHWM", "RssAnon"), 0)
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return sizes
    told = {name: 1024 * int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines) if name in sizes}
    return sizes | told


def _processor_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
