"""Processes that compile sizes of one order side by side: whose turn it is on the device, who measures at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine_library.atomic_files import FileLock

if TYPE_CHECKING:
    from . import Progress

log = logging.getLogger(__name__)

POLL = 0.02
"""Seconds between two looks at a lock or a file."""
FAILURES = 50
"""Failures in a row after which a lock is given up: Windows may be busy with its file for a while."""
WAITING = "waiting for the other sizes"
"""The phase of who has compiled all of its sizes and is going to measure."""


@dataclass(frozen=True)
class GpuLock:
    """Lock of the GPU that processes which compile for one order share; without siblings it does nothing.

    Attributes:
        lock: a file, by whose lock they take turns on the device; None where there are no siblings.
        gone: a file that appears when all siblings have ended.
        measures: whether this process measures what a call takes, for the manifest.
        processors: how many it may keep busy; 0 for all.
    """

    lock: Path | None = None
    gone: Path | None = None
    measures: bool = True
    processors: int = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While the block lasts no sibling computes on the device, so that what is timed there is true.

        Where the system has no lock to give it goes on without: times may be disturbed then, results never.
        """
        lock = None if self.lock is None else FileLock(self.lock)
        if lock is not None and not _acquired(lock):
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def wait_for_siblings(self, progress: Progress) -> None:
        """Return when no sibling runs any more; who started them ends this process too when one of them fails."""
        if self.gone is not None:
            progress(WAITING, 0.95)
            while not self.gone.exists():
                time.sleep(POLL)

    def to_json(self) -> dict:
        files = {name: None if file is None else str(file) for name, file in self._files().items()}
        return {**files, "measures": self.measures, "processors": self.processors}

    @classmethod
    def from_json(cls, data: Mapping | None) -> GpuLock:
        """The inverse of ``to_json``; None is what has no siblings."""
        if data is None:
            return cls()
        lock, gone = (None if data[name] is None else Path(data[name]) for name in ("lock", "gone"))
        return cls(lock, gone, data["measures"], data["processors"])

    def _files(self) -> dict[str, Path | None]:
        return {"lock": self.lock, "gone": self.gone}


def _acquired(lock: FileLock) -> bool:
    """Wait for a lock and take it; False where the system has none to give."""
    failures = 0
    while failures < FAILURES:
        try:
            if lock.acquire():
                return True
            failures = 0
        except OSError as error:
            failures += 1
            if failures == FAILURES:
                log.warning("Hybrid TRT: sizes are compiled without taking turns on the device (%s)", error)
        time.sleep(POLL)
    return False
