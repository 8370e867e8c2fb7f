"""A backend for tests only: builds slowly, crashes, fails or fills the disk on demand, which no real one does.

Found because a test adds this folder to the pack's backends' path; told what to do by HYBRID_TRT_TEST_BUILD.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

STEP = 0.05


class SlowBackend:
    """Duck-typed, so that it needs nothing of the pack."""

    name = "slow"
    preference = -1
    measured_on = ()
    builds_on_gpu = False
    build_stack = 0
    runs_live_weights = False
    refits = False
    precisions = ("float16", "bfloat16", "float32")
    notice = ""

    def version(self) -> str:
        return os.environ.get("HYBRID_TRT_TEST_VERSION", "1")

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
        return name in ("engine.slow", "parameters.json")

    def options(self, settings: Any) -> dict:
        return {}

    def build_memory(self, weights: int) -> int:
        return 0

    def weights(self, network: Any, check: Any = None) -> str:
        return network.weights_hash(check)

    def engine_profile(self, profile: Any) -> Any:
        return profile

    def sizes(self, engine: Any) -> list:
        return []

    def in_use(self, engines: Any) -> list:
        return list(engines)[:1]

    def to_build(self, *_: Any) -> list:
        return []

    def build(self, request: Any, progress: Any) -> list[str]:
        (request.folder / "engine.slow").write_bytes(b"slow" * 1000)
        for name in os.environ.get("HYBRID_TRT_TEST_BUILD", "finish").split(","):
            getattr(self, "_" + name)(request, progress)
        return ["engine.slow"]

    def _finish(self, request: Any, progress: Any) -> None:
        for step in range(5):
            progress("compiling", step / 5)
            time.sleep(STEP)

    def _silence(self, request: Any, progress: Any) -> None:
        """As TensorRT does: one long phase without a word."""
        progress("compiling", 0.5)
        time.sleep(600)

    def _hold_the_gil(self, request: Any, progress: Any) -> None:
        """As a native build that never lets Python's other threads run."""
        import ctypes

        progress("compiling", 0.5)
        ctypes.PyDLL(None).sleep(600)

    def _print(self, request: Any, progress: Any) -> None:
        print("from Python")
        os.write(1, b"from below Python\n")
        sys.stderr.write("a warning\n")

    def _stack(self, request: Any, progress: Any) -> None:
        """Tells its stack and that of threads which libraries start, and what its own children would ask for."""
        import ctypes
        import resource

        print("stack", resource.getrlimit(resource.RLIMIT_STACK)[0], os.environ.get("HYBRID_TRT_BUILD_STACK"))
        attributes, size = ctypes.create_string_buffer(64), ctypes.c_size_t()
        library = ctypes.CDLL(None)
        library.pthread_attr_init(attributes)
        library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
        print("stack of threads", size.value)

    def _helper(self, request: Any, progress: Any) -> None:
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        progress(f"helper {helper.pid}", 0.1)

    def _segfault(self, request: Any, progress: Any) -> None:
        sys.stderr.write("about to crash\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGSEGV)

    def _killed(self, request: Any, progress: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _exit(self, request: Any, progress: Any) -> None:
        os._exit(3)

    def _error(self, request: Any, progress: Any) -> None:
        raise RuntimeError("the compiler is confused")


BACKEND = SlowBackend()
BACKENDS = (BACKEND,)
