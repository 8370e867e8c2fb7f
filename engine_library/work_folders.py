"""Folders for what is not an engine yet, or no longer: inside the library, invisible to it, swept when left behind."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from pathlib import Path

from .files import sweep_temporaries
from .lock import FileLock

log = logging.getLogger(__name__)

BUILD_PREFIX = ".building-"
_LOCK_SUFFIX = ".lock"

_mine: dict[Path, FileLock] = {}
_guard = threading.Lock()


def new_work_folder(root: Path) -> Path:
    """A new empty folder below ``root`` that belongs to this process until ``remove_work_folder`` or its end."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / f"{BUILD_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        lock = FileLock(_lock_path(folder))
        if lock.acquire():
            break
    try:
        folder.mkdir()
    except BaseException:
        lock.release()
        raise
    with _guard:
        _mine[folder] = lock
    return folder


def remove_work_folder(folder: Path) -> None:
    """Remove a work folder with all that is in it, or only what is left of it after its contents were moved away."""
    shutil.rmtree(folder, ignore_errors=True)
    with _guard:
        lock = _mine.pop(folder, None)
    if lock is not None:
        lock.release()


def sweep(root: Path) -> list[str]:
    """Remove the work folders of processes that are dead, and return their names. Never raises for want of rights."""
    swept = []
    try:
        sweep_temporaries(root)
        found = {p if p.suffix != _LOCK_SUFFIX else p.with_suffix("") for p in root.glob(f"{BUILD_PREFIX}*")}
        for folder in sorted(found):
            lock = FileLock(_lock_path(folder))
            if not lock.acquire():
                continue  # its process lives
            if lock.reliable:
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder.name)
            lock.release()
    except OSError as error:
        log.debug("Hybrid TRT: %s was not swept (%s)", root, error)
    if swept:
        log.info("Hybrid TRT: removed what %d unfinished build(s) had left in %s", len(swept), root)
    return swept


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK_SUFFIX)
