"""Commands that run side by side, each on one of several GPUs, as soon as those that they need have ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TICK = 0.5
"""Seconds between two looks at what has ended."""


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        gpu: number of the GPU that it sees, as its only one; jobs of one GPU may run at once.
        needs: names of jobs that have to have ended, well or not, before it starts.
        after: the same of jobs that need not be there.
        alone: it starts when no other job of its GPU runs, and none starts beside it.
        still: meanwhile all other jobs are stopped, on every GPU: what it measures waits for the host.
        environment: variables besides our own.
        folder: where it runs; by default where we do.
    """

    name: str
    command: Sequence[str]
    gpu: int = 0
    needs: Sequence[str] = ()
    alone: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    after: Sequence[str] = ()
    still: bool = False


class _Running:
    def __init__(self, job: Job, folder: Path):
        temporary = folder / "temporary" / job.name  # locks are there: what shares a GPU need not wait for the others
        temporary.mkdir(parents=True, exist_ok=True)
        self.job, self.started = job, time.monotonic()
        with (folder / f"{job.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                [*job.command], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=job.folder,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(job.gpu), "TMPDIR": str(temporary), **job.environment},
            )  # fmt: skip

    def stop(self) -> None:
        """Let the command and all that it started wait."""
        self._each(psutil.Process.suspend)

    def go_on(self) -> None:
        self._each(psutil.Process.resume)

    def _each(self, call: Callable[[psutil.Process], None]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.process.pid)
            call(command)  # first: stopped it starts no more
            for process in command.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    call(process)


def run(jobs: Sequence[Job], folder: Path) -> dict[str, int]:
    """Run all jobs; their output goes to ``<name>.log`` in the folder. Returns each one's exit status.

    Raises:
        ValueError: a job needs one that is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {job.name for job in jobs}
    for job in jobs:
        if unknown := set(job.needs) - names:
            raise ValueError(f"{job.name} needs {', '.join(sorted(unknown))}, which is not among the jobs")
    waiting, running, ended, began = list(jobs), [], {}, time.monotonic()

    def tell(what: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:7.1f} s  {what}\n")
        sys.stdout.flush()

    while waiting or running:
        for one in [one for one in running if one.process.poll() is not None]:
            running.remove(one)
            ended[one.job.name] = one.process.returncode
            tell(f"{one.job.name} ended with {one.process.returncode} after {time.monotonic() - one.started:.1f} s")
            if one.job.still:
                for other in running:
                    other.go_on()
        for job in list(waiting):
            beside = [one.job for one in running if one.job.gpu == job.gpu]
            awaited = set(job.needs) | set(job.after) & names
            if any(one.job.still for one in running):
                break
            if awaited <= ended.keys() and not any(job.alone or other.alone for other in beside):
                waiting.remove(job)
                for other in running if job.still else ():
                    other.stop()
                running.append(_Running(job, folder))
                tell(f"{job.name} started on GPU {job.gpu}")
        if not running and waiting:
            raise ValueError(f"these need one another: {', '.join(job.name for job in waiting)}")
        time.sleep(TICK)
    return ended
