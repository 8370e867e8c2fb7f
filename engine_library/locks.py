"""Locks between processes and machines, and folders for work in progress.

The system's lock on a file says at once that its holder is dead, but only to processes that share its kernel and its
mount. Other machines with the folder may not see it. So a lock file holds its holder's record, which changes every few
seconds. A process that sees no change for long enough, by its own clock, takes the lock over.

The package filelock has such leases too. Its ``SoftFileLease`` takes a living holder's lock at once where another
machine has the same host name, and the lock of a living but silent holder on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from . import safe_files, schema
from .safe_files import SMALL, claim, move, open_regular, read_bytes, sweep_temporaries, temporary_beside

log = logging.getLogger(__name__)

BEAT = 5.0
"""Seconds between two life signs."""
SILENCE = 40.0
"""Seconds without a life sign after which a holder counts as dead."""
LENGTH = 512
"""Bytes of every record, so that nobody reads half of it."""
_ATTEMPTS = 100
_SETTLE = 0.5
"""Seconds after a takeover in which another machine's takeover of the same lock becomes visible."""
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_LOCKED_BYTE = 1 << 30  # far behind the text: Windows lets nobody read a locked byte
_REMEMBERED = 1000

_seen: dict[Path, tuple[bytes, float]] = {}
"""Lock file of another machine -> its contents, and since when, by this process's clock."""


class FileLock:
    """Lock between processes and machines: a file with its holder's name in it. Without a living holder it is free.

    Attributes:
        reliable: False on file systems that cannot lock; there life signs alone decide.
    """

    def __init__(self, path: Path):
        self.path = path
        self.reliable = True
        self._id = secrets.token_hex(8)
        self._file: FileIO | None = None
        self._using = threading.Lock()
        self._ended = threading.Event()

    def acquire(self) -> bool:
        """Take the lock if it is free; never waits, but for half a second when it takes over from a dead machine.

        Raises:
            OSError: the file cannot be made, for example because the folder is read-only.
        """
        for _ in range(_ATTEMPTS):
            try:
                descriptor = open_regular(self.path, os.O_RDWR)
            except FileNotFoundError:
                self._appear()
                continue
            with contextlib.ExitStack() as unless_held:
                file = unless_held.enter_context(FileIO(descriptor, "r+"))
                if not self._lock(file):
                    return False
                if not _is_at(file, self.path):
                    continue  # its last holder removed it between our open and our lock
                if not self._take(file):
                    return False
                unless_held.pop_all()
                self._file = file
                self._ended.clear()
                threading.Thread(target=self._live, name="hybrid-trt lock", daemon=True).start()
                return True
        raise FileExistsError(errno.EEXIST, "can be neither opened nor made", str(self.path))

    def _take(self, file: FileIO) -> bool:
        """Put our record into a file that the system let us lock, unless its holder may live on another machine.

        Of several machines that take a lock over at once, the last has it.
        """
        file.seek(0)
        text = file.read(SMALL)
        holder = _parsed(text)
        if holder.get("lock") == self._id:
            return True
        reach = holder.get("reach")
        if not reach or self.reliable and reach == _reach(file):
            self._write(file)
            return True
        if not _is_silent(self.path, text):
            return False
        self._write(file)
        time.sleep(_SETTLE)
        ours = self._read().get("lock") == self._id
        if ours:
            log.info("Hybrid TRT: took %s over: no life sign for %.0f s", self.path.name, SILENCE)
        return ours

    def _live(self) -> None:
        """Give life signs until the lock is given back or lost."""
        while not self._ended.wait(BEAT) and not self.lost():
            with self._using:
                if self._file is not None:
                    self._write(self._file)

    def lost(self) -> bool:
        """Tell whether another machine took this lock over, since it saw no life sign."""
        if self._file is None:
            return False
        try:
            return _parsed(read_bytes(self.path, SMALL)).get("lock", self._id) != self._id
        except FileNotFoundError:
            return True  # another machine took it over and gave it back
        except OSError:
            return False  # the disk does not answer: nobody can have taken it

    def release(self, keep: bool = False) -> None:
        """Give the lock back and remove its file, unless that is to be kept."""
        keep = keep or self.lost()
        self._ended.set()
        with self._using:
            file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(OSError), file:
            if not keep:
                self.path.unlink(missing_ok=True)  # while still locked: a waiting process sees that this file is gone
        if safe_files.WINDOWS and not keep:
            with contextlib.suppress(OSError):  # a process that has just opened it keeps it
                self.path.unlink()

    def holder(self) -> str:
        """Return in words which process holds it."""
        holder = self._read()
        return "process {pid} on {host}".format(**holder) if {"pid", "host"} <= holder.keys() else "another process"

    def is_elsewhere(self) -> bool:
        """Tell whether its holder is on another machine, or in a container with a mount of its own."""
        with contextlib.suppress(OSError):
            return self._read().get("reach", "") not in ("", _reach(self.path))
        return False

    def _read(self) -> dict[str, Any]:
        """Return the fields of its holder's record; none where it cannot be read."""
        try:
            return _parsed(read_bytes(self.path, SMALL))
        except OSError:
            return {}

    def _write(self, file: FileIO) -> None:
        """Write our record at once and always as long, so that nobody reads half of it, and have other machines see it.

        It has our name for people, the lock's id, the reach of our system's lock, and a life sign.
        """
        try:
            record = {"pid": os.getpid(), "host": socket.gethostname(), "lock": self._id, "reach": _reach(file),
                      "sign": time.monotonic_ns()}  # fmt: skip
            file.seek(0)
            file.write(json.dumps(record).encode().ljust(LENGTH))
            file.truncate(LENGTH)  # the rest of a longer record would spoil ours
            os.fsync(file.fileno())
        except OSError:
            pass  # a full disk: the lock holds all the same, only namelessly

    def _appear(self) -> None:
        """Make the lock file with us as its holder, unless it is there; the first process to lock it has it."""
        temporary = temporary_beside(self.path)
        try:
            self._make(temporary)
            claim(temporary, self.path)
        except FileExistsError:
            pass
        except OSError:  # no links on this disk, or a full disk
            with contextlib.suppress(FileExistsError):
                self._make(self.path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _make(self, path: Path) -> None:
        with FileIO(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+") as file:
            self._write(file)

    def _lock(self, file: FileIO) -> bool:
        try:
            _system_lock(file.fileno())
        except OSError as error:
            if error.errno in _BUSY:
                return False
            log.warning("Hybrid TRT: %s lies on a file system that cannot lock (%s).", self.path.parent, error)
            self.reliable = False
        return True


def _system_lock(descriptor: int) -> None:
    if safe_files.WINDOWS:
        import msvcrt

        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _reach(file: FileIO | Path) -> str:
    """Return an id of the scope of the system's lock on a file: one kernel, and one mount of the file's disk."""
    status = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
    return f"{_kernel()} {status.st_dev}"


@functools.cache
def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _is_at(file: FileIO, path: Path) -> bool:
    """Tell whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _parsed(text: bytes) -> dict[str, Any]:
    """Return the fields of a holder's record; none for any other text."""
    try:
        found = schema.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_silent(path: Path, text: bytes) -> bool:
    """Tell whether this text has stood in a lock file for so long that its holder is dead. The first look says no."""
    known, since = _seen.get(path, (None, 0.0))
    if known == text:
        return time.monotonic() - since >= SILENCE
    if len(_seen) >= _REMEMBERED:
        _seen.clear()  # every holder is then watched anew
    _seen[path] = text, time.monotonic()
    return False


# --- folders for what is not an engine yet, or no longer: invisible to the library, swept when left behind ---

BUILD_PREFIX = ".building-"
REPLACED = ".replaced"
"""In a work folder: the engine that a new engine will replace."""
_LOCK_SUFFIX = ".lock"


@contextlib.contextmanager
def work_folder(root: Path) -> Iterator[Path]:
    """Yield an empty folder below ``root`` that belongs to this process; in the end remove it with all that is in it.

    Its contents may be moved away before.
    """
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / f"{BUILD_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        lock = FileLock(_lock_path(folder))
        if lock.acquire():
            break
    try:
        folder.mkdir()
        yield folder
    finally:
        _clear(folder)
        lock.release()


@contextlib.contextmanager
def out_of_the_way(engine: Path) -> Iterator[None]:
    """Move an engine's folder aside, if it is there, while another takes its name; back where that fails.

    Raises:
        OSError: it cannot be moved, for example since a file of it is in use (on Windows).
    """
    if not engine.exists():
        yield
        return
    with work_folder(engine.parent) as aside:
        (aside / REPLACED).mkdir()
        move(engine, aside / REPLACED / engine.name)
        yield


def _clear(folder: Path) -> bool:
    """Remove a work folder; False if an engine lies in it that cannot be put back: the next sweep tries again."""
    back = _put_back(folder)
    if back:
        shutil.rmtree(folder, ignore_errors=True)
    return back


def _put_back(folder: Path) -> bool:
    """Give engines that lie aside in a work folder their names again, where these are free; False if that failed."""
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
    """Remove the work folders and locks of processes that are dead. Never raises for want of rights.

    Returns:
        The names of the folders.
    """
    swept = []
    try:
        sweep_temporaries(root)
        found = {p if p.suffix != _LOCK_SUFFIX else p.with_suffix("") for p in root.glob(f"{BUILD_PREFIX}*")}
        for folder in sorted(path for path in found if not path.is_symlink()):
            lock = FileLock(_lock_path(folder))
            if not lock.acquire():
                continue  # its process lives
            if lock.reliable and _clear(folder):
                swept.append(folder.name)
            lock.release()
        for path in root.glob(f".*{_LOCK_SUFFIX}"):
            _sweep_lock(path)
    except OSError as error:
        log.debug("Hybrid TRT: %s was not swept (%s)", root, error)
    if swept:
        log.info("Hybrid TRT: removed what %d unfinished build(s) had left in %s", len(swept), root)
    return swept


def _sweep_lock(path: Path) -> None:
    """Remove the lock file of an engine that nobody builds. A process about to lock it sees that it is gone."""
    with contextlib.suppress(OSError):  # another user's
        if path.is_symlink() or path.stat().st_size != LENGTH:
            return  # not our lock file
        lock = FileLock(path)
        if lock.acquire():
            lock.release(keep=not lock.reliable)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK_SUFFIX)
