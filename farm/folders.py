"""Folders of workers, each locked for as long as its worker lives; those that killed workers left are removed."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

LOCK, NOTE = ".lock", ".farm"
"""The note has the farm's name. It is written once the lock is held, so a folder with a note and no lock is left."""


def take(work: Path, farm: str) -> tuple[Path, FileLock]:
    """Make a folder for a worker of a farm, and lock it until the worker ends."""
    folder = work / uuid.uuid4().hex[:12]
    folder.mkdir(parents=True)
    lock = FileLock(folder / LOCK)
    lock.acquire(timeout=0)
    (folder / NOTE).write_text(farm, encoding="utf-8")
    return folder, lock


def remove_left(work: Path, farm: str) -> None:
    """Remove the folders of workers of other farms that are dead. Those of this farm keep their logs until it ends."""
    for note in work.glob(f"*/{NOTE}"):
        lock = FileLock(note.with_name(LOCK))
        try:
            if note.read_text(encoding="utf-8") == farm:
                continue
            lock.acquire(timeout=0)
        except (OSError, Timeout):  # it is being removed by another worker, or lives
            continue
        shutil.rmtree(note.parent, ignore_errors=True)
        lock.release()
