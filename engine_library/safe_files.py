"""Safe opening and writing of files in folders that other people write to.

Only regular files are opened, and no link is followed. Else a link would have us read or overwrite a file elsewhere, a
pipe would keep us waiting for ever, and a huge file would take all memory. Files appear whole, by a rename. The rules
of Windows hold everywhere: there an open file can be neither renamed, replaced nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import schema

_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FOREIGN_RIGHTS = 0o077
"""Rights of everybody but the owner."""
_FOREIGN_WRITE = 0o022
"""Rights to write, of everybody but the owner."""
SMALL, NOTES = 1 << 20, 1 << 25
"""Most bytes of a file of settings, and of notes on many models or nodes."""


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a file and return its descriptor; flags and mode are as of ``os.open``.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder.
    """
    if not hasattr(os, "O_NOFOLLOW") and os.path.islink(path):  # Windows
        raise _no_regular_file(path)
    try:
        descriptor = os.open(path, flags | _CAREFUL, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise _no_regular_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_regular_file(path)
    return descriptor


def is_private(descriptor: int, path: Path) -> bool:
    """Tell whether an open file is this user's alone; True where the system, or its disk, knows no such rights."""
    if not hasattr(os, "geteuid"):  # Windows
        return True
    found = os.fstat(descriptor)
    if not found.st_mode & _FOREIGN_RIGHTS:
        return found.st_uid in (0, os.geteuid())
    return not _keeps_rights(path.parent)


def is_own_folder(folder: Path) -> bool:
    """Tell whether nobody but this user, and root, can put files into a folder; makes it where it is missing.

    True where its disk knows no such rights.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    if not hasattr(os, "geteuid"):  # Windows, where temporary files are each user's own
        return True
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not found.st_mode & _FOREIGN_WRITE and found.st_uid in (0, os.geteuid()) or not _keeps_rights(folder)


def other_users_may_write(folder: Path) -> bool:
    """Tell whether other users may put files into a folder; False where that is not known."""
    try:
        found = folder.stat()
    except OSError:
        return False
    if not hasattr(os, "geteuid"):  # Windows
        return False
    foreign = os.geteuid() != 0 and found.st_uid not in (0, os.geteuid())
    return (foreign or bool(found.st_mode & stat.S_IWOTH)) and _keeps_rights(folder)


def _keeps_rights(folder: Path) -> bool:
    """Tell whether a disk keeps a file's rights as they are set; True where that cannot be tried."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # made for its owner alone
            return not os.fstat(file.fileno()).st_mode & _FOREIGN_RIGHTS
    except OSError:
        return True


def read_bytes(path: Path, most: int) -> bytes:
    """Return the contents of a file.

    Raises:
        OSError: as ``open_regular``; also when it has more than ``most`` bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        contents = file.read(most + 1)
    if len(contents) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return contents


def read_json(path: Path, most: int = SMALL) -> Any:
    """Return what a JSON file says.

    Raises:
        OSError: as ``read_bytes``.
        MalformedInput: it is no JSON.
    """
    return schema.loads(read_bytes(path, most))


def _no_regular_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "is no regular file", str(path))


# --- files that appear whole ---

TEMPORARY = ".tmp-"
"""Beginning of the name of every file that does not have its final name yet."""
ABANDONED = 3600.0
"""Seconds after which a temporary file counts as abandoned."""
WINDOWS = os.name == "nt"
RENAME_SECONDS = 2.0
"""Seconds that a rename waits for a reader or a virus scanner to let go of a file; needed on Windows only."""


def temporary_beside(path: Path) -> Path:
    """Return a name for a file that will become ``path``, in the same folder."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}")


def write_file(path: Path, contents: bytes | str, durable: bool = False) -> None:
    """Write a file so that readers find the old or the new contents, never a part. The folder has to be there.

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
        OSError: also when, on Windows, somebody keeps either file open.
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
    (os.rename if WINDOWS else os.link)(source, target)  # neither replaces a file that is there


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
    """Remove half-written files of processes that died an hour ago or more, by the clock of the folder's disk."""
    for path in list(folder.glob(f"{TEMPORARY}*")):
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=folder) as new:
                age = os.fstat(new.fileno()).st_mtime - path.stat().st_mtime
            if age > ABANDONED:
                path.unlink()


def _patiently(rename: Callable[[], None]) -> None:
    deadline = time.monotonic() + RENAME_SECONDS
    while True:
        try:
            return rename()
        except PermissionError:
            if not WINDOWS or time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
