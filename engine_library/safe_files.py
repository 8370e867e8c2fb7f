"""Safe opening of files that others may have replaced: only regular files are opened, and no link is followed.

Anybody who can write to the library's folder can put anything there. A link would have us read or overwrite a file
elsewhere, a pipe would keep us waiting for ever, and a huge file would take all memory.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from . import schema

_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
OTHERS = 0o077
"""The rights of everybody but the owner."""
WRITABLE = 0o022
"""Everybody else's rights to write."""
SMALL, NOTES = 1 << 20, 1 << 25
"""Most bytes of a file of settings, and of notes on many models or nodes."""


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a file and return its descriptor; flags and mode are those of ``os.open``.

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
    if not found.st_mode & OTHERS:
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
    return not found.st_mode & WRITABLE and found.st_uid in (0, os.geteuid()) or not _keeps_rights(folder)


def others_may_write(folder: Path) -> bool:
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
    """Tell whether a file in a folder can be one's own; True where that cannot be tried."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # made for its owner alone
            return not os.fstat(file.fileno()).st_mode & OTHERS
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
