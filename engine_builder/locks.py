"""Waiting for one's turn: one builder per engine, whatever process it lives in, and one build at a time per GPU."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ..backends import Progress
from ..engine_library.atomic_files import FileLock

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
