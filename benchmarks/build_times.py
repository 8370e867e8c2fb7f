"""What building takes: seconds, processor seconds and memory, for full-size SD1.5 in half precision, without a GPU.

    make benchmark-builds

Random weights; the same code and child processes as the Build button. TensorRT-RTX engines are built as on a machine
without a GPU, for all RTX cards. Writes benchmarks/results/builds.json; what an earlier run said of a network and a
backend that are not asked for is kept. A few minutes on two cores, 10 GB of memory and 6 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "support")]

import networks  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from hybrid_trt.backends import Progress, backends  # noqa: E402
from hybrid_trt.engine_builder.build import BuildOrder, build_engine  # noqa: E402
from hybrid_trt.engine_builder.child_process import Log, run_in_child  # noqa: E402
from hybrid_trt.engine_library import Library  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "builds.json"
NETWORKS = ("unet", "controlnet")
BACKENDS = ("tensorrt_rtx", "onnxruntime")
PACKAGES = ("torch", "onnx", "onnxruntime", "polygraphy", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12")
SAMPLE_SECONDS = 0.05


class PeakMemory:
    """Largest resident size that a child process of this one reaches while the block lasts, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            for child in psutil.Process().children():
                try:
                    status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
                except OSError:
                    continue  # it has ended
                # the kernel keeps the highest value, so only the last moments can be missed
                found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
                self.bytes = max(self.bytes, *(1024 * int(kilobytes) for kilobytes in found), 0)


class Measured:
    """Does a build's steps in child processes, as the pack does, and keeps what each took."""

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, float]] = {}

    def __call__(self, task: Mapping, progress: Progress, log: Log, environment: Mapping[str, str]) -> dict:
        before, started = _processor_seconds(), time.perf_counter()
        with PeakMemory() as memory:
            result = run_in_child(task, progress, log, environment)
        self.steps[task["step"]] = {
            "wall_s": round(time.perf_counter() - started, 1),
            "processor_s": round(_processor_seconds() - before, 1),
            "peak_gb": round(memory.bytes / 1e9, 2),
        }
        return result


def _processor_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(network: Any, backend: str) -> dict[str, Any]:
    """Build one engine into a library that is deleted again."""
    order = BuildOrder(network, "float16", networks.PROFILE, backends()[backend])
    told = [""]

    def progress(phase: str, _fraction: float) -> None:
        if phase != told[0]:
            told[0] = phase
            sys.stderr.write(f"  {phase}\n")

    steps = Measured()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        started = time.perf_counter()
        engine = build_engine(order, Library([Path(folder)]), progress, run=steps)
        total = time.perf_counter() - started
    manifest = engine.manifest
    return {
        "backend": backend,
        "profile": str(manifest.identity.profile),
        "total_wall_s": round(total, 1),
        "export_and_check": steps.steps["export"],
        "of_that_export_wall_s": round(manifest.seconds["export"], 1),
        "of_that_check_wall_s": round(manifest.seconds["parity"], 1),
        "build": steps.steps["build"],
        "engine_gb": round(manifest.bytes / 1e9, 3),
        "rel_err": manifest.parity["rel_err"],
    }


def machine() -> dict[str, Any]:
    """What the figures depend on, besides the code."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    load = round(os.getloadavg()[0], 2)
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
            "load_average_at_start": load,
            "note": "nothing else ran" if load < 0.3 else "other work ran on this machine, so wall times are too long",
        },
        "versions": {"python": platform.python_version(), **installed},
    }


def main() -> int:
    """Measure what is asked for and write it down after each build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    known = json.loads(options.out.read_text(encoding="utf-8"))["builds"] if options.out.is_file() else []
    rows = {(row["network"], row["backend"]): row for row in known}
    here = machine()  # before the load is ours
    for kind in options.networks:
        network = networks.random_network(kind, networks.FULL_SD15, torch.float16)
        for backend in options.backends:
            sys.stderr.write(f"{kind}, {backend}\n")
            now = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **here}
            row = {"network": f"SD1.5 {kind}, float16", **measure(network, backend), **now}
            rows[row["network"], backend] = row
            options.out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"command": "make benchmark-builds", "builds": list(rows.values())}, indent=1)
            options.out.write_text(text + "\n", encoding="utf-8")
            sys.stderr.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
