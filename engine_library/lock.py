"""A lock between processes, held by an open file: the system frees it when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from pathlib import Path

from . import atomic_files
from .atomic_files import claim, temporary_beside

log = logging.getLogger(__name__)

_STARTED = time.time()
_LENGTH = 512
_ATTEMPTS = 100
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_LOCKED_BYTE = 1 << 30  # far behind the text: Windows lets nobody read a locked byte


class FileLock:
    """A lock file that says who holds it. A file that nobody holds any more is free, so nothing ever goes stale.

    The file appears with its holder's name in it: who finds it can tell whom to wait for.

    Attributes:
        reliable: False on file systems that cannot lock; there ``acquire`` always succeeds.
    """

    def __init__(self, path: Path):
        self.path = path
        self.reliable = True
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free; never waits.

        Raises:
            OSError: the file cannot be made, for example because the folder is read-only.
        """
        for _ in range(_ATTEMPTS):
            try:
                fd = os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                _appear(self.path)
                continue
            try:
                if not self._lock(fd):
                    os.close(fd)
                    return False
                if _is_at(fd, self.path):  # else its last holder removed it between our open and our lock
                    _write_holder(fd)  # it may be one that a dead holder left
                    self._fd = fd
                    return True
                os.close(fd)
            except BaseException:
                _close(fd)
                raise
        raise FileExistsError(errno.EEXIST, "can be neither opened nor made", str(self.path))

    def release(self) -> None:
        """Give the lock back and remove its file."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            self.path.unlink(missing_ok=True)  # while still locked: whoever waits sees that this file is gone
            _close(fd)
        except OSError:
            # Windows removes no open file, so whoever has just opened this one keeps it, and nothing is lost
            _close(fd)
            with contextlib.suppress(OSError):
                self.path.unlink()

    def holder(self) -> str:
        """Who holds it, in words."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            return f"process {data['pid']} on {data['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def _lock(self, fd: int) -> bool:
        try:
            _system_lock(fd)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            log.warning("Hybrid TRT: %s lies on a file system that cannot lock (%s).", self.path.parent, error)
            self.reliable = False
        return True


def _system_lock(fd: int) -> None:
    if atomic_files.WINDOWS:
        import msvcrt

        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _appear(path: Path) -> None:
    """Make the lock file with us as its holder, unless it is there; whoever locks it first has it."""
    temporary = temporary_beside(path)
    try:
        temporary.write_bytes(_holder())
        claim(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # no links on this disk, or a full disk
        with contextlib.suppress(FileExistsError):
            _write_holder(fd := os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _holder() -> bytes:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": _STARTED, "locked": time.time()}
    return json.dumps(holder).encode().ljust(_LENGTH)


def _write_holder(fd: int) -> None:
    """In one write and always as long, so that nobody reads half of it."""
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, _holder())
    except OSError:
        pass  # a full disk: the lock holds all the same, only namelessly


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass
