"""A lock between processes, held by an open file: the system frees it when its holder dies, however it dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from pathlib import Path

log = logging.getLogger(__name__)

_STARTED = time.time()
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_LOCKED_BYTE = 1 << 30  # far behind the text: Windows lets nobody read a locked byte


class FileLock:
    """A lock file that says who holds it. A file that nobody holds any more is free, so nothing ever goes stale.

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
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if not self._lock(fd):
                    os.close(fd)
                    return False
                if _is_at(fd, self.path):  # else its last holder removed it between our open and our lock
                    _write_holder(fd)
                    self._fd = fd
                    return True
                os.close(fd)
            except BaseException:
                _close(fd)
                raise

    def release(self) -> None:
        """Give the lock back and remove its file."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            self.path.unlink(missing_ok=True)  # while still locked: whoever waits sees that this file is gone
        except OSError:
            pass  # Windows removes no open file; a file without a holder is free anyway
        _close(fd)

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
    if os.name == "nt":
        import msvcrt

        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write_holder(fd: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": _STARTED, "locked": time.time()}
    try:
        os.ftruncate(fd, 0)
        os.write(fd, json.dumps(holder).encode())
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
