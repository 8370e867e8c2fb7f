"""Cost of building: seconds, processor seconds and memory, for full-size SD1.5 and SDXL, without a GPU.

    make benchmark-builds

Half precision, random weights; the same code and child processes as the Build button. TensorRT-RTX engines are built as
on a machine without a GPU, for all RTX cards; the backends build from one export. Writes
benchmarks/results/builds.json; what an earlier run said of a network and a backend that are not asked for is kept.
Half an hour on two cores, 16 GB of memory and 25 GB of disk; ``--networks sd15_unet sd15_controlnet`` a few minutes,
6 GB and 8 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "support")]

import networks
import psutil
import torch
from child_memory import Measured
from hybrid_trt.backends import Progress, backends
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker_process import Log
from hybrid_trt.engine_library import Library

RESULTS = ROOT / "benchmarks" / "results" / "builds.json"
TITLES = {"sd15": "SD1.5", "sdxl": "SDXL"}
NETWORKS = ("sd15_controlnet", "sd15_unet", "sdxl_controlnet", "sdxl_unet")
BACKENDS = ("tensorrt_rtx", "onnxruntime")
PACKAGES = ("torch", "onnx", "onnxruntime", "polygraphy", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12")


class ExportedOnce:
    """Does a build's steps and measures them; what one backend's build exported, the next one's takes over."""

    def __init__(self, folder: Path) -> None:
        self._measured = Measured()
        self._folder = folder
        self._exported: dict = {}

    @property
    def steps(self) -> dict[str, dict[str, float]]:
        return self._measured.steps

    def __call__(self, task: Mapping, progress: Progress, log: Log, environment: Mapping[str, str]) -> dict:
        if task["step"] != "export":
            return self._measured(task, progress, log, environment)
        work = Path(task["folder"])
        if self._exported:
            _link_files(self._folder, work)
        else:
            self._exported = self._measured(task, progress, log, environment)
            _link_files(work, self._folder)
        return self._exported


def _link_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        (target / file.name).unlink(missing_ok=True)
        os.link(file, target / file.name)


def measure(network: Any, backend: str, steps: ExportedOnce, folder: Path) -> dict[str, Any]:
    """Build one engine into a library that is deleted again."""
    order = BuildOrder(network, "float16", networks.PROFILE, backends()[backend])
    told = [""]

    def progress(phase: str, _fraction: float) -> None:
        if phase != told[0]:
            told[0] = phase
            sys.stderr.write(f"  {phase}\n")

    with tempfile.TemporaryDirectory(dir=folder) as library:
        engine = build_engine(order, Library([Path(library)]), progress, run=steps)
    manifest = engine.manifest
    export = steps.steps["export"]
    others = sum(seconds for name, seconds in manifest.seconds.items() if name in ("read", "build"))
    return {
        "backend": backend,
        "profile": str(manifest.identity.profile),
        "weights_bytes": 2 * sum(p.numel() for p in network.module.parameters()),
        "total_wall_s": round(export["wall_s"] + others, 1),
        "export_and_check": export,
        "of_that_export_wall_s": round(manifest.seconds["export"], 1),
        "of_that_check_wall_s": round(manifest.seconds["parity"], 1),
        "build": steps.steps["build"],
        "engine_gb": round(manifest.bytes / 1e9, 3),
        "rel_err": manifest.parity["rel_err"],
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on, besides the code."""
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
    for name in options.networks:
        family, kind = name.split("_")
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            weights, exported = Path(folder) / "weights", Path(folder) / "exported"
            exported.mkdir()
            network = networks.mapped_network(kind, networks.FULL[family], torch.float16, weights)
            steps = ExportedOnce(exported)
            for backend in options.backends:
                sys.stderr.write(f"{name}, {backend}\n")
                now = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **here}
                row = {"network": f"{TITLES[family]} {kind}, float16",
                       **measure(network, backend, steps, Path(folder)), **now}
                rows[row["network"], backend] = row
                options.out.parent.mkdir(parents=True, exist_ok=True)
                text = json.dumps({"command": "make benchmark-builds", "builds": list(rows.values())}, indent=1)
                options.out.write_text(text + "\n", encoding="utf-8")
                sys.stderr.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
