"""Life signs of locks: they show a lock's holder alive to machines that do not see each other's locks.

The system's lock says at once that a holder is dead, but only to processes that share its kernel and its mount.
Other machines with the folder may not see it. So a lock file also holds an id and a count, which its holder raises
every few seconds. A process that sees no change for long enough, by its own clock, takes the lock over.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
import time
from pathlib import Path

from . import schema
from .safe_files import SMALL, open_regular

BEAT = 5.0
"""Seconds between two life signs."""
SILENCE = 40.0
"""Seconds without a life sign after which a holder counts as dead."""
LENGTH = 512
"""Bytes of a record, always: nobody reads half of one."""
_REMEMBERED = 1000

_seen: dict[Path, tuple[bytes, float]] = {}
"""Lock file of another machine -> its contents, and since when, by this process's clock."""
_guard = threading.Lock()


def record(lock: str, reach: str, count: int) -> bytes:
    """Return a holder's record: its name for people, the lock's id, how far its lock reaches, and the count."""
    name = {"pid": os.getpid(), "host": socket.gethostname()}
    return json.dumps(name | {"lock": lock, "reach": reach, "count": count}).encode().ljust(LENGTH)


def reach(file: int | Path) -> str:
    """Return an id of the scope of the system's lock on a file: one kernel, and one mount of the file's disk."""
    return f"{_kernel()} {os.stat(file).st_dev}"


@functools.cache
def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def write(descriptor: int, lock: str, count: int = 0, durable: bool = False) -> None:
    """Write a record into an open file at once and always as long, so that nobody reads half of it.

    Args:
        durable: have other machines see it.
    """
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, record(lock, reach(descriptor), count))
        os.ftruncate(descriptor, LENGTH)  # the rest of a longer record would spoil ours
        if durable:
            os.fsync(descriptor)
    except OSError:
        pass  # a full disk: the lock holds all the same, only namelessly


def write_new(path: Path, lock: str) -> None:
    """Make a file with a record.

    Raises:
        OSError: it is there, or cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    write(descriptor, lock)
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Tell whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def close(descriptor: int) -> None:
    """Close a file that may be closed already."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def contents(descriptor: int) -> bytes:
    """Return the contents of an open lock file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, SMALL)


def read(path: Path) -> bytes:
    """Return the contents of a lock file.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    descriptor = open_regular(path)  # opened anew each time: a network disk then asks its server
    try:
        return contents(descriptor)
    finally:
        os.close(descriptor)


def parsed(text: bytes) -> tuple[str, str]:
    """Return the lock's id and its reach; both are empty in records of earlier versions."""
    try:
        fields = schema.loads(text)
        return str(fields.get("lock", "")), str(fields.get("reach", ""))
    except (ValueError, AttributeError):
        return "", ""


def names(path: Path, lock: str) -> bool:
    """Tell whether a lock is still the one that its file names, as far as that can be read."""
    try:
        return parsed(read(path))[0] in ("", lock)
    except FileNotFoundError:
        return False  # another machine took it over and gave it back
    except OSError:
        return True  # the disk does not answer: nobody can have taken it


def elsewhere(path: Path) -> bool:
    """Tell whether a lock's holder is on another machine, or in a container with a mount of its own."""
    try:
        return parsed(read(path))[1] not in ("", reach(path))
    except OSError:
        return False


def is_silent(path: Path, text: bytes) -> bool:
    """Tell whether this text has stood in a lock file for so long that its holder is dead. The first look says no."""
    now = time.monotonic()
    with _guard:
        known = _seen.get(path)
        if known is None or known[0] != text:
            if len(_seen) >= _REMEMBERED:
                _seen.clear()  # every holder is then watched anew
            _seen[path] = (text, now)
            return False
        return now - known[1] >= SILENCE


def forget(path: Path) -> None:
    """Forget a lock file that this process has got or given back."""
    with _guard:
        _seen.pop(path, None)


def disk_time(path: Path) -> float:
    """Return the time by the clock that stamps files, on a shared disk another machine's; makes a file to learn it.

    Raises:
        OSError: nothing can be written there.
    """
    path.write_bytes(b"now")
    try:
        return path.stat().st_mtime
    finally:
        path.unlink()
