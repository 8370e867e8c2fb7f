"""Resources of a build: locks of an engine and its GPU, and main memory."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ..backends import Backend, Progress
from ..engine_library import BuildError, Reason, Unavailable, life_signs
from ..engine_library.atomic_files import FileLock
from ..engine_library.disk import gigabytes

log = logging.getLogger(__name__)

POLL = 0.25
LOOK = 1.0
"""Seconds between two looks at a lock that is held."""
TAKEN = "it took this build over, having seen no sign of life of this one for a while"


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
        if not patient and life_signs.elsewhere(lock.path):
            raise Unavailable(Reason.BUILT_ELSEWHERE, lock.holder())
        progress(words.format(lock.holder()), 0.0)
        time.sleep(POLL)


def _gpu_lock(device: torch.device) -> FileLock | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device.index or 0)
    return FileLock(Path(tempfile.gettempdir()) / f"hybrid-trt-{name}.lock")


FIXED = 1_000_000_000
"""Bytes for Python, torch, ComfyUI's classes and the backend's library."""
EXPORT = 0.9
"""Memory of export and check against native, in sizes of the weights."""
CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(backend: Backend, weights: int) -> int:
    """Main memory that building an engine of so many bytes of weights takes at its peak."""
    return FIXED + int(max(weights * EXPORT, backend.build_memory(weights)))


def available_bytes() -> int:
    """Main memory that a new process can have without others being swapped out or ended."""
    import psutil  # ComfyUI itself needs it

    return min(psutil.virtual_memory().available, _left_in_container())


def check_memory(backend: Backend, weights: int, label: str, checks: bool = False) -> None:
    """Raise BuildError when the memory for building the engine of ``label`` is not there.

    Args:
        weights: bytes of them in main memory.
        checks: whether the engine is there already, and only compared.
    """
    least, available = FIXED + int(weights * EXPORT), available_bytes()
    needed = least if checks else needed_bytes(backend, weights)
    if available < needed:
        other = f", or choose the backend onnxruntime, which needs {gigabytes(least)}" if least < needed else ""
        raise BuildError(
            f"{'checking' if checks else 'building'} the engine of {label} with {backend.name} needs about "
            f"{gigabytes(needed)} of main memory and {gigabytes(available)} are available, so it was not started and "
            "the normal model keeps running; close other programs or unload ComfyUI's models, then build again"
            f"{other}"
        )


def _left_in_container() -> float:
    """Return the free bytes below the container's limit; infinite without a limit."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # none, "max", or not Linux
        return float("inf")
    files = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return max(0, limit - used + files)
