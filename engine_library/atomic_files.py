"""Files that appear whole, locks between processes, and folders for work in progress.

The rules of Windows hold everywhere: there an open file can be neither renamed, replaced nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import life_signs
from .safe_files import SMALL, open_regular, read_json

log = logging.getLogger(__name__)

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
    """Remove half-written files of processes that died an hour ago or more."""
    for path in list(folder.glob(f"{TEMPORARY}*")):
        with contextlib.suppress(OSError):
            if life_signs.disk_time(temporary_beside(path)) - path.stat().st_mtime > ABANDONED:
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


# --- locks: the system frees one when its holder dies, however it dies; between machines, silence does ---

_ATTEMPTS = 100
_SETTLE = 0.5
"""Seconds after a takeover in which another machine's takeover of the same lock becomes visible."""
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_LOCKED_BYTE = 1 << 30  # far behind the text: Windows lets nobody read a locked byte


class FileLock:
    """Lock between processes and machines: a file with its holder's name in it. Without a living holder it is free.

    On one machine, the system's lock on the file decides. It does not always reach other machines. So the holder
    writes life signs into the file, and a machine that sees none for long enough takes the lock over.

    Attributes:
        reliable: False on file systems that cannot lock; there life signs alone decide.
    """

    def __init__(self, path: Path):
        self.path = path
        self.reliable = True
        self._id = secrets.token_hex(8)
        self._fd: int | None = None
        self._using = threading.Lock()
        self._ended = threading.Event()

    def acquire(self) -> bool:
        """Take the lock if it is free; never waits, but for half a second when it takes over from a dead machine.

        Raises:
            OSError: the file cannot be made, for example because the folder is read-only.
        """
        for _ in range(_ATTEMPTS):
            try:
                fd = open_regular(self.path, os.O_RDWR)
            except FileNotFoundError:
                _appear(self.path, self._id)
                continue
            try:
                if not self._lock(fd):
                    os.close(fd)
                    return False
                if life_signs.is_at(fd, self.path):  # else its last holder removed it between our open and our lock
                    text = life_signs.contents(fd)
                    if self._is_free(fd, text) or life_signs.is_silent(self.path, text) and self._take_over(fd):
                        self._hold(fd)
                        return True
                    os.close(fd)
                    return False
                os.close(fd)
            except BaseException:
                life_signs.close(fd)
                raise
        raise FileExistsError(errno.EEXIST, "can be neither opened nor made", str(self.path))

    def _is_free(self, fd: int, text: bytes) -> bool:
        """Tell whether nobody can hold a file that the system let us lock."""
        lock, reach = life_signs.parsed(text)
        return lock == self._id or not reach or self.reliable and reach == life_signs.reach(fd)

    def _take_over(self, fd: int) -> bool:
        """Put our record in the place of a dead machine's; of several that do it at once, the last one has the lock."""
        life_signs.write(fd, self._id, durable=True)
        time.sleep(_SETTLE)
        ours = life_signs.parsed(life_signs.read(self.path))[0] == self._id
        if ours:
            log.info("Hybrid TRT: took %s over: no life sign for %.0f s", self.path.name, life_signs.SILENCE)
        return ours

    def _hold(self, fd: int) -> None:
        life_signs.forget(self.path)
        life_signs.write(fd, self._id)  # the file may still have a dead holder's name
        self._fd = fd
        self._ended.clear()
        threading.Thread(target=self._live, name="hybrid-trt lock", daemon=True).start()

    def _live(self) -> None:
        """Give life signs until the lock is given back or lost."""
        count = 0
        while not self._ended.wait(life_signs.BEAT):
            if self.lost():
                return
            count += 1
            with self._using:
                if self._fd is None:
                    return
                life_signs.write(self._fd, self._id, count, durable=True)

    def lost(self) -> bool:
        """Tell whether another machine took this lock over, since it saw no life sign."""
        return self._fd is not None and not life_signs.names(self.path, self._id)

    def release(self, keep: bool = False) -> None:
        """Give the lock back and remove its file, unless that is to be kept."""
        keep = keep or self.lost()
        self._ended.set()
        with self._using:
            fd, self._fd = self._fd, None
        if fd is None:
            return
        if keep:
            return life_signs.close(fd)
        try:
            self.path.unlink(missing_ok=True)  # while still locked: a waiting process sees that this file is gone
            life_signs.close(fd)
        except OSError:
            # Windows removes no open file, so a process that has just opened this one keeps it
            life_signs.close(fd)
            with contextlib.suppress(OSError):
                self.path.unlink()

    def holder(self) -> str:
        """Return in words which process holds it."""
        try:
            data = read_json(self.path, SMALL)
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
    if WINDOWS:
        import msvcrt

        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _appear(path: Path, lock: str) -> None:
    """Make the lock file with us as its holder, unless it is there; the first process to lock it has it."""
    temporary = temporary_beside(path)
    try:
        life_signs.write_new(temporary, lock)
        claim(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # no links on this disk, or a full disk
        with contextlib.suppress(FileExistsError):
            life_signs.write_new(path, lock)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


# --- folders for what is not an engine yet, or no longer: invisible to the library, swept when left behind ---

BUILD_PREFIX = ".building-"
REPLACED = ".replaced"
"""In a work folder: the engine that a new engine will replace."""
_LOCK_SUFFIX = ".lock"

_mine: dict[Path, FileLock] = {}
_guard = threading.Lock()


def new_work_folder(root: Path) -> Path:
    """Make an empty folder below ``root`` that belongs to this process until ``remove_work_folder`` or its end."""
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
    """Remove a work folder with all that is in it; its contents may have been moved away."""
    shutil.rmtree(folder, ignore_errors=True)
    _forget(folder)


def _forget(folder: Path) -> None:
    with _guard:
        lock = _mine.pop(folder, None)
    if lock is not None:
        lock.release()


@contextlib.contextmanager
def out_of_the_way(engine: Path) -> Iterator[None]:
    """Move an engine's folder aside, if it is there, while another takes its name; back where that fails.

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
            if lock.reliable and _put_back(folder):
                shutil.rmtree(folder, ignore_errors=True)
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
        if path.is_symlink() or path.stat().st_size != life_signs.LENGTH:
            return  # not our lock file
        lock = FileLock(path)
        if lock.acquire():
            lock.release(keep=not lock.reliable)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK_SUFFIX)
