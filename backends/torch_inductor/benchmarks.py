"""Inductor times kernels on the GPU while it compiles; here it does so when no sibling computes there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..gpu_lock import GpuLock

log = logging.getLogger(__name__)


@contextmanager
def in_turn(turns: GpuLock) -> Iterator[None]:
    """While the block lasts Inductor times each kernel in a turn of ours.

    All that it times (configurations of Triton's kernels, whether padding a product pays) goes through one function of
    one object. A torch that has another one is left alone: its choices may then be disturbed, its results are not.
    """
    if turns.lock is None:
        yield
        return
    try:
        from torch._inductor.runtime.benchmarking import benchmarker

        measure = benchmarker.benchmark_gpu
    except (ImportError, AttributeError) as error:
        log.warning("Hybrid TRT: this torch times kernels without taking turns (%s)", error)
        yield
        return

    def measure_in_turn(*args: Any, **named: Any) -> Any:
        with turns.taken():
            return measure(*args, **named)

    benchmarker.benchmark_gpu = measure_in_turn
    try:
        yield
    finally:
        del benchmarker.benchmark_gpu  # the class's own is seen again
