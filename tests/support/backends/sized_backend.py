"""A backend for tests only: "compiles" sizes without a compiler, and keeps a journal of who used the device when.

Found as ``slow_backend`` is. HYBRID_TRT_TEST_SIZES says what else it does with a size: JSON, batch -> behaviour;
HYBRID_TRT_TEST_JOURNAL where the journal is to lie.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TURN = 0.1


class SizedBackend:
    """Duck-typed, so that it needs nothing of the pack."""

    name = "sized"
    preference = -1
    measured_on = ()
    builds_on_gpu = True
    build_stack = 0
    runs_live_weights = True
    refits = False
    in_parts = False
    precisions = ("float32",)

    def version(self) -> str:
        return "1"

    def target(self, device: Any) -> str:
        return "any"

    def unavailable(self, device: Any) -> None:
        return None

    def cannot_build(self, device: Any) -> None:
        return None

    def refuses(self, manifest: Any, device: Any) -> None:
        return None

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

    def to_build(self, *_: Any) -> list:
        return []

    def compile(self, function: Any, task: Any, progress: Any) -> dict:
        behaviours = json.loads(os.environ.get("HYBRID_TRT_TEST_SIZES", "{}"))
        cases, seconds = [], {}
        for i, sizes in enumerate(task.sizes):
            batch, started = sizes["B"], time.perf_counter()
            progress(f"compiling for batch {batch}", 0.05 + 0.95 * i / len(task.sizes))
            note("compiling", batch=batch, siblings=task.turns.lock is not None)
            getattr(self, "_" + behaviours.get(str(batch), "nothing"))(task)
            with task.turns.taken():
                began = time.time()
                time.sleep(TURN)
                note("turn", began=began, ended=time.time())
            (task.folder / self._file(sizes)).write_bytes(b"compiled" * batch)
            cases.append({**sizes, "rel_err": batch / 1e6})
            seconds[f"compile_{Path(self._file(sizes)).stem}"] = time.perf_counter() - started
        parity = {"rel_err": max(case["rel_err"] for case in cases), "limit": 1e-4, "cases": cases, "against": "none"}
        if task.turns.measures:
            task.turns.wait_for_siblings(progress)
            note("measured", siblings=siblings())
            parity["native_ms"] = 1000.0 + task.sizes[0]["B"]
        return {"files": [self._file(sizes) for sizes in task.sizes], "seconds": seconds, "parity": parity}

    def _file(self, sizes: dict[str, int]) -> str:
        return "-".join(f"{symbol}{size}" for symbol, size in sorted(sizes.items())) + ".bin"

    def _nothing(self, task: Any) -> None:
        """Goes on."""

    def _late(self, task: Any) -> None:
        time.sleep(1.5)

    def _silence(self, task: Any) -> None:
        time.sleep(600)

    def _last(self, task: Any) -> None:
        wait_until(lambda: of_siblings("turn"))
        time.sleep(1.0)

    def _fails(self, task: Any) -> None:
        wait_until(lambda: len(of_siblings("compiling")) > 1)
        note("failed")
        raise RuntimeError("the compiler is confused")

    def _fails_in_company(self, task: Any) -> None:
        if task.turns.lock is not None:
            raise RuntimeError("the compiler is confused by parts")

    def _fails_later(self, task: Any) -> None:
        wait_until(lambda: {line["pid"] for line in of_siblings("failed")} - set(siblings()))
        time.sleep(1.0)
        raise RuntimeError("too late to be told")

    def _killed_in_company(self, task: Any) -> None:
        if task.turns.lock is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    def _gpu_full_in_company(self, task: Any) -> None:
        import torch

        if task.turns.lock is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def _killed(self, task: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _talks(self, task: Any) -> None:
        """In pieces, as long as the sibling does."""
        for number in range(100):
            for piece in (f"line {number} of ", "a child ", "is whole\n"):
                sys.stderr.write(piece)
                sys.stderr.flush()
            time.sleep(0.005)


def siblings() -> list[int]:
    """Processes of the journal that run beside this one."""
    import psutil

    return sorted(pid for pid in {line["pid"] for line in of_siblings()} if psutil.pid_exists(pid))


def of_siblings(what: str | None = None) -> list[dict]:
    """The journal's lines of other processes."""
    lines = map(json.loads, Path(os.environ["HYBRID_TRT_TEST_JOURNAL"]).read_text().splitlines())
    return [line for line in lines if line["pid"] != os.getpid() and what in (None, line["what"])]


def wait_until(happened: Callable[[], object]) -> None:
    """Return as soon as it has, however busy the machine is."""
    while not happened():
        time.sleep(0.02)


def note(what: str, **more: Any) -> None:
    """One line of the journal, in one write."""
    line = json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **more}) + "\n"
    file = os.open(os.environ["HYBRID_TRT_TEST_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


BACKEND = SizedBackend()
BACKENDS = (BACKEND,)
