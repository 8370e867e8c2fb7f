"""Resources of a build: its locks, main memory, room on the GPU, the time of its steps and sizes for a CPU."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ..architectures import Architecture
from ..architectures.calls import Call
from ..backends import Backend, Progress, backends
from ..comfy_model.main_memory import available_bytes
from ..engine_library import BuildError, Reason, Unavailable
from ..engine_library.disk import gigabytes
from ..engine_library.locks import FileLock
from ..sessions.session import says_out_of_memory
from .order import BuildOrder
from .worker.task import Task
from .worker_process import Log
from .worker_tasks import Runner

log = logging.getLogger(__name__)

POLL = 0.25
LOOK = 1.0
"""Seconds between two looks at a lock that is held."""
TAKEN = "it took this build over, having seen no sign of life of this one for a while"
FIXED = 1_000_000_000
"""Python, torch, ComfyUI's classes and the backend's library."""
EXPORT = 0.9
"""Export and check against native, in sizes of the weights."""
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


@contextmanager
def hold(engine_lock: FileLock, device: torch.device, progress: Progress, patient: bool = True) -> Iterator[Progress]:
    """Hold the locks of an engine and of its GPU; waits for both, and reports their holders.

    Yields a ``progress`` to use meanwhile: it raises when another machine takes the engine's lock over.

    Args:
        patient: wait for an engine that another machine builds, too.

    Raises:
        OSError: the library cannot be written.
        Unavailable: another machine builds the engine.
    """
    with ExitStack() as held:
        _wait(engine_lock, "waiting for the same engine that {} builds", progress, patient)
        held.callback(engine_lock.release)
        gpu_lock = _gpu_lock(device)
        if gpu_lock is not None:
            try:
                _wait(gpu_lock, "waiting for the GPU, on which {} builds", progress)
                held.callback(gpu_lock.release)
            except OSError as error:
                log.debug("Hybrid TRT: no lock for %s (%s)", device, error)  # another user's: then builds may overlap
        with _ours(engine_lock, progress) as progress_while_ours:
            yield progress_while_ours


@contextmanager
def _ours(lock: FileLock, progress: Progress) -> Iterator[Progress]:
    """Stop a build whose lock is lost, and raise that reason in place of any other error.

    The other machine's engine is as good. If both are published at the same moment, no harm is done: both are whole,
    and one replaces the other.
    """

    looked = time.monotonic()

    def progress_while_ours(phase: str, fraction: float) -> None:
        nonlocal looked
        if time.monotonic() - looked >= LOOK:
            looked = time.monotonic()
            if lock.lost():
                raise Unavailable(Reason.BUILT_ELSEWHERE, TAKEN)
        progress(phase, fraction)

    try:
        yield progress_while_ours
    except Exception as error:
        if lock.lost():
            raise Unavailable(Reason.BUILT_ELSEWHERE, TAKEN) from error
        raise


def _wait(lock: FileLock, words: str, progress: Progress, patient: bool = True) -> None:
    lock.path.parent.mkdir(parents=True, exist_ok=True)
    while not lock.acquire():
        if not patient and lock.is_elsewhere():
            raise Unavailable(Reason.BUILT_ELSEWHERE, lock.holder())
        progress(words.format(lock.holder()), 0.0)
        time.sleep(POLL)


def _gpu_lock(device: torch.device) -> FileLock | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device.index or 0)
    return FileLock(Path(tempfile.gettempdir()) / f"hybrid-trt-{name}.lock")


def needed_bytes(backend: Backend, weights: int) -> int:
    """Main memory that building an engine of so many bytes of weights takes at its peak."""
    return FIXED + int(max(weights * EXPORT, backend.build_memory(weights)))


def check_memory(backend: Backend, weights: int, label: str, checks: bool = False) -> None:
    """Raise BuildError when the memory for building the engine of ``label`` is not there.

    Args:
        weights: bytes of them in main memory.
        checks: whether the engine is there already, and only compared.
    """
    needed = FIXED + int(weights * EXPORT) if checks else needed_bytes(backend, weights)
    available = available_bytes()
    if available < needed:
        of_files = [one for one in backends().values() if not one.runs_live_weights]
        best = min(of_files, key=lambda one: needed_bytes(one, weights))
        less = needed_bytes(best, weights)
        other = f", or choose the backend {best.name}, which needs {gigabytes(less)}" if less < needed else ""
        raise BuildError(
            f"{'checking' if checks else 'building'} the engine of {label} with {backend.name} needs about "
            f"{gigabytes(needed)} of main memory and {gigabytes(available)} are available, so it was not started and "
            "the normal model keeps running; close other programs or unload ComfyUI's models, then build again"
            f"{other}"
        )


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


def with_room(run: Runner, order: BuildOrder, make_room: MakeRoom) -> Runner:
    """Return a runner that has the GPU freed before steps that need it; live weights' engines have room beside others.

    They are compiled block by block, without weights.
    """
    device = order.target_device

    def run_with_room(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
        on_gpu = {"export": False, "check": True}.get(task["step"], order.backend.builds_on_gpu)
        if not on_gpu or device.type != "cuda":
            return {**run(task, progress, log_line, environment), WAITED: 0.0}
        if order.backend.runs_live_weights and torch.cuda.mem_get_info(device)[0] >= BLOCK_ROOM:
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
