"""Folders of workers, each locked while its worker lives; folders of killed workers are removed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

LOCK, NOTE = ".lock", ".farm"
"""The note has the farm's name. It is written once the lock is held, so a folder with a note and no lock is left."""
FILLED = ("output", "temp")
"""Folders that a worker's ComfyUI fills: all their files belong to the running prompt."""
_KIND = re.compile(r" ?\[(input|output|temp)\]$")
_LONGEST = 4096


def take(work: Path, farm: str) -> tuple[Path, FileLock]:
    """Make a folder for a worker of a farm, and lock it until the worker ends."""
    folder = work / uuid.uuid4().hex[:12]
    folder.mkdir(parents=True, mode=0o700)
    lock = FileLock(folder / LOCK)
    lock.acquire(timeout=0)
    (folder / NOTE).write_text(farm, encoding="utf-8")
    empty(folder)
    return folder, lock


def empty(folder: Path) -> None:
    """Remove a prompt's files from a worker's folder."""
    for name in FILLED:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(exist_ok=True)


def check_paths(texts: Iterable[str], folder: Path, starts: Iterable[Path]) -> None:
    """Check that no text of a workflow, read as a path, leads to other workers' files.

    Args:
        folder: the folder of the workflow's worker.
        starts: more folders that paths may start from.

    Raises:
        ValueError: one leads there; the text says which.
    """
    own = Path(os.path.realpath(folder))
    filled = [own / name for name in FILLED]
    for text in texts:
        if len(text) > _LONGEST:  # longer than paths of any system
            continue
        for start in (*filled, *starts):
            with contextlib.suppress(UnicodeError):  # no path
                path = Path(os.path.realpath(start / _KIND.sub("", text).replace("\0", "")))
                if path.is_relative_to(own.parent) and not any(map(path.is_relative_to, filled)):
                    raise ValueError(f"The input {text!r} leads to what the farm or another prompt keeps: a workflow "
                                     "has its own pictures alone.")  # fmt: skip


def remove_left(work: Path, farm: str) -> None:
    """Remove the folders of dead workers; logs of this farm's workers stay until another worker starts."""
    for note in work.glob(f"*/{NOTE}"):
        lock = FileLock(note.with_name(LOCK))
        try:
            gone = map(note.with_name, FILLED) if note.read_text(encoding="utf-8") == farm else [note.parent]
            lock.acquire(timeout=0)
        except (OSError, Timeout):  # another worker removes it, or its worker lives
            continue
        for left in gone:
            shutil.rmtree(left, ignore_errors=True)
        lock.release()
