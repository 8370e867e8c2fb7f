"""Times of calls on a GPU, for the figures of an engine's build or check."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable

import torch

WARM, TIMED = 3, 10
"""Calls before the clock is looked at, and calls of which the median counts."""


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call on the GPU, the host's part in it."""
    return statistics.median(each(call, WARM, TIMED))


def each(call: Callable[[], object], warm: int, timed: int) -> list[float]:
    """Milliseconds of some calls by CUDA events, each call alone, after some that do not count."""
    for _ in range(warm):
        call()
    times = []
    for _ in range(timed):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def driver_version() -> str:
    """The version of NVIDIA's driver; ``""`` where its tool does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return (told.split() or [""])[0]
