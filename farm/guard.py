"""Runs a command for as long as its standard input is open, so that no ComfyUI outlives a worker that was killed.

Ray kills the children of a worker that ends, this process too: then Linux ends the command.

    python guard.py COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

END_SECONDS = 20.0
_PARENT_DEATH_SIGNAL = 1  # prctl's name for it


def run(command: list[str]) -> int:
    """Run a command and return its exit status; end it when standard input ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_bound_to_us())
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    return process.wait()


def _bound_to_us() -> Callable[[], None] | None:
    """Return a function for a new process that makes Linux kill it when we end; None elsewhere."""
    if sys.platform != "linux":
        return None
    prctl, us = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != us:  # too late
            os._exit(1)

    return bind


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while sys.stdin.buffer.read1(4096):
        pass
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
