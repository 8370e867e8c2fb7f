"""A machine of its own, of which only files in a shared folder reach the others: its system's locks do not.

    machine.py FOLDER NAME SILENCE CLOCK

CLOCK: seconds that its clock is ahead. Reads commands from its input, a line each, and answers with one line of JSON:
``take FILE``, ``give``, ``lost``, ``elsewhere``, ``folder`` (makes a work folder) and ``sweep``.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import pack  # noqa: F401
from hybrid_trt.engine_library import locks
from hybrid_trt.engine_library.locks import FileLock

_kept = ExitStack()  # work folders, until this process ends
_locked: dict[tuple[int, int], int] = {}


def _lock_here(fd: int) -> None:
    """Lock a file against others of this process alone."""
    found = os.fstat(fd)
    holder = _locked.get((found.st_dev, found.st_ino), fd)
    if holder != fd and _is_open(holder, found):
        raise BlockingIOError(errno.EAGAIN, "locked")
    _locked[found.st_dev, found.st_ino] = fd


def _is_open(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:  # closed, which frees the lock
        return False


def become(name: str, silence: float, ahead: float = 0.0) -> None:
    """Make this process a machine of its own."""
    right = time.time
    time.time = lambda: right() + ahead
    locks._kernel = lambda: name
    locks.BEAT, locks.SILENCE = silence / 10, silence
    locks._system_lock = _lock_here
    locks._SETTLE = 0.1


def answer(folder: Path, lock: FileLock, command: str) -> object:
    """Do what a line says."""
    if command == "give":
        return lock.release()
    if command == "folder":
        work = _kept.enter_context(locks.work_folder(folder))
        (work / "half").write_text("an engine")
        return work.name
    if command == "sweep":
        return locks.sweep(folder)
    return {"take": lock.acquire, "lost": lock.lost, "elsewhere": lock.is_elsewhere}[command]()


class Machine:
    """The process of such a machine, for tests."""

    def __init__(self, folder: Path, name: str, silence: float, ahead: float = 0.0):
        arguments = [str(folder), name, str(silence), str(ahead)]
        self.process = subprocess.Popen([sys.executable, "-P", str(Path(__file__)), *arguments], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def reply(self) -> object:
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str) -> object:
        self.tell(command)
        return self.reply()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    root = Path(sys.argv[1])
    become(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
    taken: dict[str, FileLock] = {}
    used = FileLock(root / "a.lock")
    for line in sys.stdin:
        command, _, file = line.strip().partition(" ")
        if file:
            used = taken.setdefault(file, FileLock(root / file))
        sys.stdout.write(json.dumps(answer(root, used, command)) + "\n")
        sys.stdout.flush()
