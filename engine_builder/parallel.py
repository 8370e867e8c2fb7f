"""Compiling with several processes, and with one where that fails.

Inductor is one thread of Python for most of its time: on many cores it takes about as long as on two. So the network
is cut, and several processes compile the parts:

1. ``room_for_processes`` returns the number of helpers. Below two, the worker process compiles all by itself.
2. The worker starts that many helpers (``worker.helpers``), which import Inductor while it reads the network.
3. The worker chooses the attention kernel, traces each size and cuts it (``torch_inductor.parts``). All sizes together
   have as many parts as there are helpers, or one each. A helper takes one part after the other. It gets shapes and
   no weights, so it is small.
4. The worker puts each size together, compares it with native and measures the first. The helpers do nothing then.
5. A failure may be due to the cut, or to a lack of memory: one process then compiles the uncut network.

Inductor times a few kernels while it compiles. Helpers may disturb each other there, as a prompt may. It takes the
least of many times, and results do not depend on the choice.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping

import torch

from ..architectures import architectures
from ..architectures.calls import serves_every_size
from ..backends import Progress, backends
from ..comfy_model.main_memory import CGROUP, available_bytes
from ..engine_library import BuildError
from .resources import needed_bytes
from .worker.task import Task, tensors_of
from .worker_process import Log, run_in_worker

log = logging.getLogger(__name__)

MOST, MOST_PER_SIZE = 8, 4
"""Processes at once. In eight parts a UNet compiled 2 s sooner than in four, and ran less beside its ControlNets: a
step of SD1.5 with one took 7.67 ms in place of 7.03 (H200)."""
CORES = 2
"""Cores for each helper: Inductor's own thread and a compiler of kernels."""
COMPILING = 2_000_000_000
"""Bytes of main memory for each helper, with its compilers. Measured on 16 cores: 1.2 GB."""
PART = 800_000_000
"""Bytes on the GPU for each helper. Measured on an H200: 0.64 GB."""
SHARE = 2 / 3
"""Share of free GPU memory that a build may use; the rest is for prompts that begin meanwhile."""
CONTEXT = 1_500_000_000
"""Bytes on the GPU for the worker's CUDA, its libraries and their scratch memory."""
LEAST_ACTIVATIONS = 1_000_000_000
ACTIVATIONS = 30
"""Bytes on the GPU while a network computes, per byte of its inputs and outputs; a safe estimate."""


def run_step(task: Task, progress: Progress, log_line: Log, environment: Mapping[str, str]) -> dict:
    """Do a task of ``worker.steps`` as ``run_in_worker`` does, with helpers where it compiles a whole network.

    Networks in blocks need no helpers: one process compiles each kind in seconds.
    """
    cut = task["step"] == "compile" and not serves_every_size(architectures()[task["architecture"]])
    count = room_for_processes(task) if cut else 0
    if count < 2:
        return run_in_worker(task, progress, log_line, environment)
    reached = 0.0

    def forward(phase: str, fraction: float) -> None:
        nonlocal reached
        reached = max(reached, fraction)
        progress(phase, reached)

    try:
        parts = {"processes": count, "compilers": processors() // count}
        return run_in_worker(task | parts, forward, log_line, environment)
    except BuildError as failure:
        log_line(f"compiling with {count} processes: {failure}")
        log_line("that may be for want of memory, or because the network was cut: now one process compiles all of it")
    return run_in_worker(task, forward, log_line, environment)


def room_for_processes(task: Task) -> int:
    """Return how many helpers a compiling worker may have."""
    weights = task["bytes"]
    held = 0 if task["device"] == "cuda" else weights  # they are drawn on the GPU
    main_memory = available_bytes() - needed_bytes(backends()[task["backend"]], held)
    counts = processors() // CORES, main_memory // COMPILING, _room_on_gpu(task, weights)
    log.info("Hybrid TRT: cores, memory and the GPU have room for so many processes: %s", counts)
    return int(min(MOST, MOST_PER_SIZE * len(task["compiled"]), *counts))


def processors() -> int:
    """Return how many cores this process may keep busy: its affinity, up to its container's share."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # none, "max", or not Linux
        return count


def _room_on_gpu(task: Task, weights: int) -> float:
    if task["device"] != "cuda":
        return math.inf
    try:
        free, _ = torch.cuda.mem_get_info(task["gpu"])
    except RuntimeError as error:
        log.warning("Hybrid TRT: the GPU does not tell its free memory (%s)", error)
        return 0
    inputs, outputs = tensors_of(task)
    largest = max(
        sum(math.prod(spec.shape(sizes)) * getattr(torch, spec.dtype).itemsize for spec in (*inputs, *outputs))
        for sizes in task["compiled"]
    )
    worker = CONTEXT + weights + max(LEAST_ACTIVATIONS, ACTIVATIONS * largest)
    return (SHARE * free - worker) // PART
