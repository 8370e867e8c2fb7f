"""Steps by which the environment is made: lines of progress, commands with a log, and locks that all clones share.

Only the standard library is used here, since nothing else is there yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

PROGRESS_SECONDS = 15
LOG_TAIL_LINES = 20


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def say(message: str) -> None:
    """One progress line, on stderr: stdout belongs to the command that runs in the environment."""
    print(f"[environment] {message}", file=sys.stderr, flush=True)


def clean_variables() -> dict[str, str]:
    """Our variables without those that would let packages from outside into the virtual environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def pip(python: Path) -> list[str]:
    """The command line that an interpreter's own pip begins with."""
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def run_logged(command: Sequence[str], doing: str, log: Path, lock: IO[bytes]) -> None:
    """Run a command with its output in the log, and say every few seconds that it still runs.

    The child shares the lock: should we be killed, nobody else starts the same work before the child has ended.
    """
    started = time.monotonic()
    said = 0
    variables = clean_variables() | {"DEBIAN_FRONTEND": "noninteractive", "PIP_PROGRESS_BAR": "off"}
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            pass_fds=(lock.fileno(),),
        ) as process:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=PROGRESS_SECONDS * (said + 1) - (time.monotonic() - started))
                    break
                said += 1
                say(f"{doing}, {time.monotonic() - started:.0f} s so far, log at {log}")
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
        raise SetupError(f"{doing} failed (exit status {status}). The end of {log}:\n{tail}")


@contextlib.contextmanager
def shared_lock(cache: Path, name: str) -> Iterator[IO[bytes]]:
    """Hold a lock that all clones on this machine share; wait for it, and say so."""
    with (cache / f"{name}.lock").open("ab") as file:
        started = time.monotonic()
        told = -float(PROGRESS_SECONDS)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited - told >= PROGRESS_SECONDS:
                    told = waited
                    say(f"another process makes {name}: waiting for it, {waited:.0f} s so far")
                time.sleep(0.2)
        yield file
