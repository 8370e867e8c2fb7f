"""The child process of a build: one task from stdin, events to stdout, one JSON object a line.

Events: ``{"progress": [phase, fraction]}``, and as the last one ``{"result": ...}`` or ``{"failed": ...}``. Everything
that any library prints goes to stderr, which the server keeps as the build's log.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from ...engine_library import BuildError, Unavailable, ValidationFailed
from ...sessions.session import first_line, says_out_of_memory


def in_json(error: Exception) -> dict:
    """A failure for the server: its ``kind`` and ``text``."""
    if isinstance(error, BuildError):
        return {"kind": "refuted" if isinstance(error, ValidationFailed) else "build", "text": str(error)}
    if isinstance(error, Unavailable):
        return {"kind": "unavailable", "reason": error.fallback.reason.value, "text": error.fallback.detail}
    if says_out_of_memory(error):
        return {"kind": "build", "text": (
            f"memory did not suffice ({first_line(error)}), so no engine was made and the normal model keeps "
            "running; close other programs, unload ComfyUI's models or choose smaller sizes, then build again"
        )}  # fmt: skip
    return {"kind": "error", "text": first_line(error), "errno": getattr(error, "errno", None)}


OOM_SCORE = 500
"""Makes Linux end the child, and not the server, when memory runs out."""
NICE = 10
"""Priority behind the server and the desktop; Linux also orders reads and writes by it."""

RARELY = (50_000, 20, 20)
"""Thresholds of Python's garbage collection: imports make half a million objects that stay, and it reads them all."""


def main(arguments: list[str]) -> int:
    """Do the task on stdin. Ends with the process that started it, however that ends."""
    events = _private_stdout()
    order = json.loads(sys.stdin.buffer.readline())
    _die_with(order["parent"])
    _be_modest()
    gc.set_threshold(*RARELY)
    _keep_to(order["task"])
    sys.path.extend(p for p in order["sys_path"] if p not in sys.path)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    lock = threading.Lock()

    def tell(**event: Any) -> None:
        with lock:
            events.write(json.dumps(event).encode() + b"\n")

    try:
        from .steps import STEPS

        task = order["task"]
        result = STEPS[task["step"]](task, lambda phase, fraction: tell(progress=[phase, fraction]))
    except Exception as error:
        failed = in_json(error)
        if failed["kind"] == "error" or says_out_of_memory(error):
            traceback.print_exc()
        tell(failed=failed)
    else:
        tell(result=result)
    sys.stderr.flush()
    os._exit(0)  # freeing gigabytes in good order would only take time


def _private_stdout() -> Any:
    """A private copy of stdout; all other writes to stdout, in Python or below it, go to stderr."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return events


def _die_with(parent: int) -> None:
    """End this process when the one that started it ends: its pipe closes, and Linux kills besides."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, name="watch the server", daemon=True).start()


def _be_modest() -> None:
    """Give the server priority for processor and memory."""
    try:
        if hasattr(os, "nice"):
            os.nice(NICE)
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    except OSError:
        pass  # not Linux, or not allowed


def _keep_to(task: dict) -> None:
    """Make allocations fail beyond the ``memory`` of a task, with its weights' file, which is mapped.

    Linux would grant them, and then kill any process.
    """
    if "memory" not in task or sys.platform != "linux":
        return
    import resource

    weights = Path(task["weights_file"]).stat().st_size if "weights_file" in task else 0
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = task["memory"] + weights
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
