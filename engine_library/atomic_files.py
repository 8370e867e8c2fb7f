"""Files that appear whole, also on Windows: there an open file can be neither renamed, replaced nor removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

TEMPORARY = ".tmp-"
"""Begins the name of every file that is not under its own name yet."""
ABANDONED = 3600.0
"""Seconds after which such a file belongs to nobody any more."""
WINDOWS = os.name == "nt"
PATIENCE = 2.0
"""Seconds in which a reader or a virus scanner has to let go of a file; elsewhere nobody can hold one."""


def temporary_beside(path: Path) -> Path:
    """A name for a file that will become ``path``, in the same folder."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}")


def write_file(path: Path, contents: bytes | str, durable: bool = False) -> None:
    """Write a file so that others find the old one or the new one, never a part. The folder has to be there.

    Args:
        durable: force it to the disk, which takes milliseconds; for what cannot be worked out again.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(contents if isinstance(contents, bytes) else contents.encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def replace(source: Path, target: Path) -> None:
    """Rename a file over another.

    Raises:
        OSError: also when, on Windows, somebody keeps one of them open.
    """
    _patiently(lambda: os.replace(source, target))


def move(source: Path, target: Path) -> None:
    """Rename a file or folder to a name that is free.

    Raises:
        OSError: also when, on Windows, somebody keeps a file open in it.
    """
    _patiently(lambda: os.rename(source, target))


def claim(source: Path, target: Path) -> None:
    """Give a finished file its name, unless that is taken.

    Raises:
        FileExistsError: it is.
        OSError: this file system cannot do it.
    """
    (os.rename if WINDOWS else os.link)(source, target)  # the one renames over nothing, the other links over nothing


def sync(path: Path) -> None:
    """Force a file's contents, or a folder's list of names, to the disk."""
    # Windows flushes only what is open for writing, and opens no folders at all
    folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    except PermissionError:
        if folder:
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_temporaries(folder: Path) -> None:
    """Remove what processes left half written that died an hour ago or more."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()


def _patiently(rename: Callable[[], None]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return rename()
        except PermissionError:
            if not WINDOWS or time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
