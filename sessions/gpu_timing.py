"""Time of calls on a GPU, for the figures of an engine's build or check."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM, TIMED = 3, 10
"""Calls that are not timed, and calls of which the median counts."""


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call on the GPU, the host's part included."""
    return statistics.median(each(call, WARM, TIMED))


def each(call: Callable[[], object], warm: int, timed: int) -> list[float]:
    """Return the milliseconds of ``timed`` calls by CUDA events, each call alone, after ``warm`` calls."""
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
