"""Runs a command for as long as its standard input is open, so that no ComfyUI outlives a worker that was killed.

    python guard.py COMMAND...
"""

from __future__ import annotations

import subprocess
import sys
import threading

PATIENCE = 20.0


def run(command: list[str]) -> int:
    """Run a command and return its exit status; end it when standard input ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    return process.wait()


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while sys.stdin.buffer.read1(4096):
        pass
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
