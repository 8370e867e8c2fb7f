"""The server's side of a child process: start it, read its events, end it, and say in words how it ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ..backends import Progress
from ..engine_library import BuildError, LibraryError, Reason, Unavailable, ValidationFailed
from ..engine_library.disk import ALMOST_NOTHING, NOT_WRITABLE, free_bytes, readable

SCRIPT = Path(__file__).with_name("standalone.py")
TICK = 0.25
"""Seconds between calls of ``progress``; a cancel is noticed this fast."""
LAST_WORDS = 3
STARTING = "starting"
"""The phase until the child reports its first."""


STILL, BUSY = 600.0, 1.0
"""A child without events that takes less than ``BUSY`` seconds of processor time in ``STILL`` seconds hangs."""
KILL_SECONDS = 10.0
"""Seconds to wait for a killed child; later builds do not wait for longer."""
LOOK = 2.0
"""Seconds between looks at its processor time."""

_KINDS = {"build": BuildError, "refuted": ValidationFailed}
"""Word of a worker process for its failure -> our exception."""

Log = Callable[[str], None]
"""Takes one line of the child's output."""


def run_in_worker(task: Mapping, progress: Progress, log: Log, environment: Mapping[str, str] | None = None) -> dict:
    """Do a task of ``worker.steps`` in a process of its own and return its result.

    Args:
        progress: called several times a second, with the latest phase and fraction; if it raises, the child ends.
        environment: variables for the child besides the server's own.

    Raises:
        BuildError: the child said so, or crashed; the text is for the user.
        Unavailable: the backend cannot build here.
        LibraryError: the disk is full or cannot be written.
    """
    words: deque[str] = deque(maxlen=LAST_WORDS)

    def hear(line: str) -> None:
        words.append(line)
        log(line)

    process = _start(environment)
    listeners: list[threading.Thread] = []
    try:
        events: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        listeners = [
            _thread(_read_events, process.stdout, events.put, hear), _thread(_read_lines, process.stderr, hear)
        ]
        # other packs put paths that are no text there, which Python does not look at either
        folders = [folder for folder in sys.path if isinstance(folder, str)]
        order = {"task": task, "parent": os.getpid(), "sys_path": folders}
        _thread(_send, process.stdin, json.dumps(order).encode() + b"\n")
        phase, last = _follow(events, progress, Pulse(process.pid))
        if last is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            _end(process)
            listeners[1].join(1.0)
            raise _crashed(process.returncode, phase, list(words), Path(task["folder"]))
        if "failed" in last:
            raise _failure(last["failed"], phase, Path(task["folder"]))
        return last["result"]
    finally:
        _end(process)
        for listener in listeners:
            listener.join(1.0)


class Pulse:
    """Sign of life of a process and its helpers: processor time. Without it, a process is stopped or its disk hangs."""

    def __init__(self, pid: int) -> None:
        self._pid, self._taken, self._still = pid, 0.0, 0.0
        self._looked = time.monotonic()

    def still_for(self) -> float:
        """Return the seconds in which it took less than ``BUSY`` of processor time."""
        passed = time.monotonic() - self._looked
        if passed >= LOOK:
            self._looked += passed
            self._still += min(passed, 2 * LOOK)  # in a longer interval the machine slept
            taken = _processor_seconds(self._pid)
            if abs(taken - self._taken) >= BUSY:
                self._taken, self._still = taken, 0.0
        return self._still


def _processor_seconds(pid: int) -> float:
    import psutil  # ComfyUI itself needs it

    total = 0.0
    with contextlib.suppress(psutil.Error):
        child = psutil.Process(pid)
        for process in (child, *child.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])  # user, system, and children that have ended
    return total


def _start(environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-X", "utf8", str(SCRIPT), "engine_builder.worker.main"]
    # a group of its own: Ctrl-C in the server's terminal is the server's, and helpers of a backend end with the child
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # OMP: a prompt may run meanwhile, and threads that wait by spinning would take the cores from it
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **(environment or {})},
        **_apart(),
    )


def _apart() -> dict[str, Any]:
    """Return options that detach the child from the server's terminal and, on Windows, lower its priority.

    Elsewhere the child itself steps back, see ``worker.main``.
    """
    if os.name == "nt":
        return {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.BELOW_NORMAL_PRIORITY_CLASS}
    return {"start_new_session": True}


def _send(pipe: IO[bytes], order: bytes) -> None:
    """Write the order. A child that died breaks the pipe, and its end says more; a child that hangs reads nothing."""
    with contextlib.suppress(OSError, ValueError):
        pipe.write(order)
        pipe.flush()


def _follow(
    events: queue.SimpleQueue[dict | None], progress: Progress, pulse: Pulse
) -> tuple[str, dict | None]:
    """Pass progress on until the last event; returns the last phase and that event, None when there was none.

    Raises:
        BuildError: the child does nothing any more.
    """
    phase, fraction = STARTING, 0.0
    reported = 0.0
    while True:
        try:
            event = events.get(timeout=TICK)
        except queue.Empty:
            event = {}
            if pulse.still_for() > STILL:
                raise BuildError(
                    f"the builder did nothing for {STILL / 60:g} minutes while {phase}, so it was ended and the normal "
                    "model keeps running; see that its disk answers and that nobody has stopped it, then build again"
                ) from None
        if event is None or "result" in event or "failed" in event:
            return phase, event
        if "progress" in event:
            before, (phase, fraction) = phase, event["progress"]
            if phase == before and time.monotonic() - reported < TICK:
                continue
        reported = time.monotonic()
        progress(phase, fraction)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child with all its helpers."""
    with contextlib.suppress(OSError):
        if os.name == "nt":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a child that waits for a disk ends once the disk answers
        process.wait(KILL_SECONDS)
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            pipe.close()


def _read_events(pipe: IO[bytes], put: Callable[[dict | None], Any], hear: Log) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed under us
        for line in pipe:
            try:
                put(json.loads(line))
            except ValueError:
                hear(line.decode(errors="replace").rstrip())
    put(None)


def _read_lines(pipe: IO[bytes], hear: Log) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in pipe:
            text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
            if text:
                hear(text)


def _thread(target: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _failure(failed: Mapping, phase: str, folder: Path) -> Exception:
    """Return our exception for a failure that a child reported."""
    if failed["kind"] in _KINDS:
        return _KINDS[failed["kind"]](failed["text"])
    if failed["kind"] == "unavailable":
        return Unavailable(Reason(failed["reason"]), failed["text"])
    if (full := _full_disk(failed["errno"], folder)) is not None:
        return full
    return BuildError(
        f"the builder failed while {phase} ({failed['text']}), so no engine was made and the normal model keeps "
        "running; see the build's log, and report this model if it happens again"
    )


def _crashed(status: int, phase: str, words: list[str], folder: Path) -> Exception:
    if (full := _full_disk(None, folder)) is not None:
        return full
    how, advice = f"ended with exit status {status}", "see the build's log"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        how = f"was ended by {name}"
        if -status == signal.SIGKILL:
            how += ", most often because the machine ran out of memory"
            advice = "close other programs or choose a smaller profile, and build again"
    elif os.name == "nt" and status > 0xFF:
        how = f"crashed with status {status:#x}"
    last = f" Its last words: {' | '.join(words)}" if words else ""
    return BuildError(
        f"the builder {how} while {phase}, so no engine was made and the normal model keeps running; {advice}.{last}"
    )


def _full_disk(number: int | None, folder: Path) -> LibraryError | None:
    """Return the error for a full disk: by its errno, or by the free bytes, as libraries in C++ give no errno."""
    if number in NOT_WRITABLE:
        return readable(OSError(number, os.strerror(number)), folder.parent)
    with contextlib.suppress(OSError):
        if free_bytes(folder) < ALMOST_NOTHING:
            return readable(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder.parent)
    return None
