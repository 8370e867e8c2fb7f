"""Windows' rules for files on a POSIX Python: what it refuses to do with open files, folders and names.

Stands for a Windows that cannot be here. Only this process's own open and mapped files count as open, and locks are
POSIX ones behind ``msvcrt``'s name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import shutil
import stat
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hybrid_trt.engine_library import safe_files

DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


class WindowsRules:
    """The functions of ``os`` as Windows has them; ``refused`` tells what they did not do."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._one_at_a_time = threading.RLock()  # Windows looks and acts in one go
        self._real: dict[str, Callable[..., Any]] = {
            name: getattr(os, name) for name in ("unlink", "rename", "replace", "fsync", "open", "mkdir", "rmdir")
        }

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        with self._one_at_a_time:
            self._free(path, "unlink")
            self._real["unlink"](path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["rmdir"](path, dir_fd=dir_fd)

    def rename(self, source: Any, target: Any) -> None:
        self._named(target)
        with self._one_at_a_time:
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "Windows renames over nothing", str(target))
            self._free(source, "rename")
            self._real["rename"](source, target)

    def replace(self, source: Any, target: Any) -> None:
        self._named(target)
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Windows replaces no folder", str(target))
        with self._one_at_a_time:
            self._free(source, "rename")
            self._free(target, "replace")
            self._real["replace"](source, target)

    def fsync(self, fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            self.refused.append("fsync")
            raise OSError(errno.EBADF, "Windows flushes only what is open for writing")
        self._real["fsync"](fd)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if isinstance(path, str | os.PathLike) and os.path.isdir(path):
            self.refused.append("open")
            raise PermissionError(errno.EACCES, "Windows opens no folder", str(path))
        if flags & os.O_CREAT:
            self._named(path)
        with self._one_at_a_time:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._named(path)
        self._real["mkdir"](path, mode, dir_fd=dir_fd)

    def _free(self, path: Any, what: str) -> None:
        """Refuse what is open, or holds something open."""
        whole = os.path.realpath(path)
        for used in _in_use():
            if used == whole or used.startswith(whole + os.sep):
                self.refused.append(what)
                raise PermissionError(errno.EACCES, f"[WinError 32] {used} is in use", str(path))

    @staticmethod
    def _named(path: Any) -> None:
        name = os.path.basename(os.fspath(path))
        if name.split(".")[0].lower() in DEVICES or name != name.rstrip(". ") or set(name) & set('<>:"|?*'):
            raise OSError(errno.EINVAL, "Windows has no such names", str(path))


def _in_use() -> Iterator[str]:
    """The regular files that this process has open or mapped."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISREG(os.stat(f"/proc/self/fd/{entry}").st_mode):
                yield os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            pass  # the one that listed them
    for line in Path("/proc/self/maps").read_text().splitlines():
        if len(parts := line.split(maxsplit=5)) == 6 and parts[5].startswith("/"):
            yield parts[5]


@contextmanager
def windows_rules() -> Iterator[WindowsRules]:
    """Windows' rules for as long as the block lasts."""
    rules = WindowsRules()
    msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK = 2
    msvcrt.locking = lambda fd, mode, count: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.MonkeyPatch.context() as patch:
        accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10 has them a second time
        for name in rules._real:
            patch.setattr(os, name, getattr(rules, name))
            if accessor is not None and hasattr(accessor, name):
                patch.setattr(accessor, name, getattr(rules, name))
        patch.setattr(os, "remove", rules.unlink)
        patch.setattr(shutil, "_use_fd_functions", False)
        patch.setitem(sys.modules, "msvcrt", msvcrt)
        patch.setattr(safe_files, "WINDOWS", True)
        patch.setattr(safe_files, "RENAME_SECONDS", 0.3)
        yield rules
