"""How many processes that compile at once a machine has room for: processor cores, main memory, memory of the GPU."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import torch

from ..backends import backends
from . import main_memory
from .worker.task import Task, tensors_of

log = logging.getLogger(__name__)

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
    """How many children may do parts of a task at once; less than 2 where one has to do all of it.

    As many as there are sizes hold the network and compare; what more there are do parts of a size, see ``LiveTask``.

    Args:
        task: of the step "compile"; ``gpu`` is the number of the GPU in this process.
    """
    weights, sizes = Path(task["weights_file"]).stat().st_size, len(task["compiled"])
    memory = COMPILING + main_memory.needed_bytes(backends()[task["backend"]], weights)
    counts = {
        "cores": processors() // CORES,
        "main memory": _fitting(main_memory.available_bytes(), sizes, memory, COMPILING),
        "memory of the GPU": _with_room_on_gpu(task, weights),
    }
    log.info("Hybrid TRT: room for so many processes at once: %s", counts)
    return int(min(counts.values()))


def _fitting(room: float, leading: int, whole: int, part: int) -> float:
    """How many children fit into ``room`` bytes: the first ``leading`` take ``whole`` each, any others ``part``."""
    return leading + (room - leading * whole) // part if room >= leading * whole else room // whole


def processors() -> int:
    """How many cores this process may keep busy: those it may run on, and no more than its container's share."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    try:
        quota, period = (main_memory.CGROUP / "cpu.max").read_text().split()
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
