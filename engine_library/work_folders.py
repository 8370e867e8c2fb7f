"""Folders for what is not an engine yet, or no longer: inside the library, invisible to it, swept when left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from .atomic_files import move, sweep_temporaries
from .lock import FileLock

log = logging.getLogger(__name__)

BUILD_PREFIX = ".building-"
REPLACED = ".replaced"
"""In a work folder: the engine that a new one is to take the place of."""
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
    _forget(folder)


def _forget(folder: Path) -> None:
    with _guard:
        lock = _mine.pop(folder, None)
    if lock is not None:
        lock.release()


@contextlib.contextmanager
def out_of_the_way(engine: Path) -> Iterator[None]:
    """Have an engine's folder moved aside, if it is there, while another takes its name; back where that fails.

    Raises:
        OSError: it cannot be moved, for example since (on Windows) one of its files is in use.
    """
    if not engine.exists():
        yield
        return
    aside = new_work_folder(engine.parent)
    try:
        (aside / REPLACED).mkdir()
        move(engine, aside / REPLACED / engine.name)
        yield
    finally:
        if _put_back(aside):
            remove_work_folder(aside)
        else:
            _forget(aside)  # the next sweep tries again


def _put_back(folder: Path) -> bool:
    """Give engines that lie aside in a work folder their names again, where these are free; False: one could not be."""
    for engine in (folder / REPLACED).glob("*"):
        target = folder.parent / engine.name
        if not target.exists():
            try:
                move(engine, target)
            except OSError as error:
                log.warning("Hybrid TRT: %s stays in %s for now (%s)", engine.name, folder, error)
                return False
    return True


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
            if lock.reliable and _put_back(folder):
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
