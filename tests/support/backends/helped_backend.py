"""A backend for tests only: "compiles" without a compiler, with helpers that misbehave, and keeps a journal of how.

Found as ``slow_backend`` is. HYBRID_TRT_TEST_BEHAVIOUR says what its helpers do, HYBRID_TRT_TEST_JOURNAL where the
journal is to lie.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from typing import Any

BEHAVIOUR = "HYBRID_TRT_TEST_BEHAVIOUR"


class HelpedBackend:
    """Duck-typed, so that it needs nothing of the pack."""

    name = "helped"
    preference = -1
    measured_on = ()
    builds_on_gpu = True
    build_stack = 0
    runs_live_weights = True
    refits = False
    precisions = ("float32",)
    notice = ""

    def version(self) -> str:
        return "1"

    def target(self, device: Any) -> str:
        return "any"

    def cannot_import(self) -> None:
        return None

    def cannot_run(self, device: Any) -> None:
        return None

    def cannot_build(self, device: Any) -> None:
        return None

    def cannot_use(self, manifest: Any, device: Any) -> None:
        return None

    def writes(self, name: str) -> bool:
        return name.endswith(".bin")

    def build_memory(self, weights: int) -> int:
        return 0

    def weights(self, network: Any, check: Any = None) -> str:
        return "any"

    def engine_profile(self, profile: Any) -> Any:
        return profile

    def sizes(self, engine: Any) -> list:
        return []

    def in_use(self, engines: Any) -> list:
        return list(engines)

    def known(self, *_: Any) -> list:
        return []

    def to_build(self, *_: Any) -> list:
        return []

    def compile(self, function: Any, task: Any, progress: Any) -> dict:
        progress("compiling", 0.05)
        with task.helpers(task.most_helpers) if task.most_helpers else nullcontext() as submit:
            pids = [asked.result() for asked in [submit(os.getpid) for _ in range(task.most_helpers)]]
            note("compiling", helpers=pids)
            getattr(self, "_" + os.environ[BEHAVIOUR])(submit)
        (task.folder / "compiled.bin").write_bytes(b"compiled")
        return {"files": ["compiled.bin"], "seconds": {}, "parity": {"rel_err": 0.0}}

    def _silence(self, submit: Any) -> None:
        submit(time.sleep, 600).result()

    def _fails(self, submit: Any) -> None:
        submit(int, "no number").result()

    def _loses_a_helper(self, submit: Any) -> None:
        submit(os._exit, 1).result()


def note(what: str, **more: Any) -> None:
    """One line of the journal, in one write."""
    line = json.dumps({"what": what, "pid": os.getpid(), **more}) + "\n"
    file = os.open(os.environ["HYBRID_TRT_TEST_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


BACKEND = HelpedBackend()
BACKENDS = (BACKEND,)
