"""Resources of a build: locks of an engine and its GPU, main memory, and how many processes may compile at once."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ..backends import Backend, Progress, backends
from ..engine_library import BuildError
from ..engine_library.atomic_files import FileLock
from ..engine_library.disk import gigabytes
from .worker.task import Task, tensors_of

log = logging.getLogger(__name__)

POLL = 0.25


@contextmanager
def hold(engine_lock: FileLock, device: torch.device, progress: Progress) -> Iterator[None]:
    """Hold the lock of an engine and that of its GPU; waits for both, telling who has them.

    Raises:
        OSError: the library cannot be written.
    """
    with ExitStack() as held:
        _wait(engine_lock, "waiting for the same engine that {} builds", progress)
        held.callback(engine_lock.release)
        gpu_lock = _gpu_lock(device)
        if gpu_lock is not None:
            try:
                _wait(gpu_lock, "waiting for the GPU, on which {} builds", progress)
                held.callback(gpu_lock.release)
            except OSError as error:
                log.debug("Hybrid TRT: no lock for %s (%s)", device, error)  # another user's: then builds may overlap
        yield


def _wait(lock: FileLock, words: str, progress: Progress) -> None:
    lock.path.parent.mkdir(parents=True, exist_ok=True)
    while not lock.acquire():
        progress(words.format(lock.holder()), 0.0)
        time.sleep(POLL)


def _gpu_lock(device: torch.device) -> FileLock | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device.index or 0)
    return FileLock(Path(tempfile.gettempdir()) / f"hybrid-trt-{name}.lock")


FIXED = 1_000_000_000
"""Python, torch, ComfyUI's classes and the backend's library."""
EXPORT = 0.9
"""Export and check against native, in sizes of the weights."""
CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(backend: Backend, weights: int) -> int:
    """Main memory that building an engine of so many bytes of weights takes at its peak."""
    return FIXED + int(max(weights * EXPORT, backend.build_memory(weights)))


def available_bytes() -> int:
    """Main memory that a new process can have without others being swapped out or ended."""
    import psutil  # ComfyUI itself needs it

    return min(psutil.virtual_memory().available, _left_in_container())


def check_memory(backend: Backend, weights: int, label: str) -> None:
    """Raise BuildError when the memory for building the engine of ``label`` is not there."""
    needed, least, available = needed_bytes(backend, weights), FIXED + int(weights * EXPORT), available_bytes()
    if available < needed:
        other = f", or choose the backend onnxruntime, which needs {gigabytes(least)}" if least < needed else ""
        raise BuildError(
            f"building the engine of {label} with {backend.name} needs about {gigabytes(needed)} of main memory and "
            f"{gigabytes(available)} are available, so it was not started and native keeps serving; close other "
            f"programs or unload ComfyUI's models, then build again{other}"
        )


def _left_in_container() -> float:
    """Return what the container's limit leaves; infinite where there is no limit."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # none, "max", or not Linux
        return float("inf")
    files = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return max(0, limit - used + files)


CORES = 2
"""For each: Inductor's own thread and a compiler of kernels."""
COMPILING = 2_000_000_000
"""Bytes of main memory for Inductor's graphs and its pool of compilers, besides what any build needs. Measured on 16
cores: 3.3 GB for two children, of a network of 1.7 GB; 2.4 GB for one, of 0.7 GB."""
CONTEXT = 1_500_000_000
"""Bytes on the GPU for CUDA, its libraries and their scratch memory. Measured on an H200, for two children in all: 6.3
GB with a network of 1.7 GB, 3.6 GB with one of 0.7 GB, where 8.4 and 6.4 GB are asked for."""
PART = 800_000_000
"""The same for a child that does a part of a size only. Measured on an H200: 0.64 GB, and 1.0 GB of main memory."""
SHARE = 2 / 3
"""Of the GPU's free memory, for all children; the rest is for prompts that begin meanwhile."""
LEAST_ACTIVATIONS = 1_000_000_000
ACTIVATIONS = 30
"""Bytes on the GPU while a network computes, plain or compiled, in bytes of all that it takes and gives; estimates on
the safe side: where they are not, the sizes are compiled one after the other in the end."""


def children_with_room(task: Task) -> int:
    """Return how many children may do parts of a task at once; less than 2 where one has to do all of it.

    As many as there are sizes hold the network and compare; what more there are do parts of a size, see ``LiveTask``.

    Args:
        task: of the step "compile"; ``gpu`` is the number of the GPU in this process.
    """
    weights, sizes = Path(task["weights_file"]).stat().st_size, len(task["compiled"])
    memory = COMPILING + needed_bytes(backends()[task["backend"]], weights)
    counts = {
        "cores": processors() // CORES,
        "main memory": _fitting(available_bytes(), sizes, memory, COMPILING),
        "memory of the GPU": _with_room_on_gpu(task, weights),
    }
    log.info("Hybrid TRT: room for so many processes at once: %s", counts)
    return int(min(counts.values()))


def _fitting(room: float, leading: int, whole: int, part: int) -> float:
    """Number of workers that fit into ``room`` bytes: the first ``leading`` take ``whole`` each, others ``part``."""
    return leading + (room - leading * whole) // part if room >= leading * whole else room // whole


def processors() -> int:
    """Return how many cores this process may keep busy: those it may run on, and no more than its container's share."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # none, "max", or not Linux
        return count


def _with_room_on_gpu(task: Task, weights: int) -> float:
    if task["device"] != "cuda":
        return math.inf
    try:
        free, _ = torch.cuda.mem_get_info(task["gpu"])
    except RuntimeError as error:
        log.warning("Hybrid TRT: the GPU does not tell its free memory (%s)", error)
        return 1
    return _fitting(SHARE * free, len(task["compiled"]), needed_on_gpu(task, weights), PART)


def needed_on_gpu(task: Task, weights: int) -> int:
    """Bytes on the GPU that compiling the largest of a task's sizes takes, and comparing it with native."""
    inputs, outputs = tensors_of(task)
    largest = max(
        sum(math.prod(spec.shape(sizes)) * getattr(torch, spec.dtype).itemsize for spec in (*inputs, *outputs))
        for sizes in task["compiled"]
    )
    return CONTEXT + weights + max(LEAST_ACTIVATIONS, ACTIVATIONS * largest)
