"""Measure everything on this machine's GPU and write one JSON file.

    python benchmarks/run.py --comfyui ~/ComfyUI --base /tmp/benchmark --out benchmarks/results/mine.json

With ``--backend tensorrt`` its engines are measured in the place of the torch backend's, and their figures are added to
the rows that are there. Full-size models with random weights are made below ``--base`` (12 GB for all). Parts that are
not asked for keep their rows from an earlier run of the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import table

PARTS = ("sd15", "sdxl", "warm", "prompts", "vae")


def networks(family: str, options: argparse.Namespace, *extra: str, **environment: str) -> list[dict[str, Any]]:
    """The rows of ``networks.py`` in a process of its own."""
    controls, steps = ("4", ["0", "1", "2", "3", "4"]) if family == "sd15" else ("2", ["0", "1", "2"])
    return rows_of("networks.py", family, options, "--controls", controls, *extra, "--steps", *steps, **environment)


def rows_of(
    script: str, family: str, options: argparse.Namespace, *extra: str, **environment: str
) -> list[dict[str, Any]]:
    """The rows of a script in a process of its own."""
    out = options.logs / f"{Path(script).stem}-{family}{'-warm' * ('--warm' in extra)}.json"
    command = [sys.executable, str(HERE / script), "--family", family, "--comfyui", str(options.comfyui),
               "--base", str(options.base), "--out", str(out), *extra]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment,
                              check=False).returncode
    if code:
        sys.stderr.write(f"{family} ended with {code}; the end of {log}:\n{log.read_text()[-2000:]}\n")
    return json.loads(out.read_text()) if out.exists() else []


def measure(part: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one part."""
    if options.backend != "torch":
        return measure_files(part, options)
    if part in ("sd15", "sdxl"):
        return networks(part, options)
    if part == "warm":
        with tempfile.TemporaryDirectory() as empty:  # what Inductor kept elsewhere must not help
            return networks("sd15", options, "--warm", TORCHINDUCTOR_CACHE_DIR=empty)
    import models
    import prompts

    models.make(options.comfyui, options.base, ["full_sd15", "full_sd15_a", "full_sd15_b"])
    if part == "vae":
        return prompts.run_vae(options.comfyui, options.base, options.logs, 2)
    return prompts.run(options.comfyui, options.base, options.logs, [0, 2], ["default", "disable-dynamic-vram"])


def measure_files(part: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one part for a backend that builds files."""
    if part in ("sd15", "sdxl"):
        controls = "2" if part == "sd15" else "0"
        return rows_of("file_engines.py", part, options, "--backend", options.backend, "--controls", controls)
    if part in ("warm", "vae"):
        return []
    import models
    import prompts

    models.make(options.comfyui, options.base, ["full_sd15", "full_sd15_a", "full_sd15_b"])
    return prompts.run_files(options.comfyui, options.base, options.logs, options.backend, 2)


def meta(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    import torch

    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True, check=False).stdout.strip()
    version = (options.comfyui / "comfyui_version.py").read_text().split('"')[1]
    return {"gpu": torch.cuda.get_device_name(0), "driver": driver, "torch": torch.__version__,
            "cuda": torch.version.cuda, "python": platform.python_version(), "comfyui": version,
            "cpu_cores": os.cpu_count(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join(["python benchmarks/run.py", *sys.argv[1:]])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's source, its requirements installed")
    parser.add_argument("--base", type=Path, required=True, help="where models and outputs go")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="default: beside --out")
    parser.add_argument("--backend", default="torch", help="torch, tensorrt, tensorrt_rtx or onnxruntime")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    options.comfyui, options.base = options.comfyui.resolve(), options.base.resolve()
    options.logs = (options.logs or options.out.parent).resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    # as any ordinary installation has it: else each process would compile torch's own Python anew
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(options.base / "python_cache"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    rows = {table.name(row): row for row in known["rows"]}
    for part in options.parts:
        for row in measure(part, options):
            before = rows.get(table.name(row), {}) if options.backend != "torch" else {}
            rows[table.name(row)] = {**row, **before, **{k: v for k, v in row.items() if options.backend in k}}
        told = meta(options)
        if options.backend != "torch":  # the others' figures are of another run
            told = {**known.get("meta", {}), options.backend: told}
        options.out.write_text(json.dumps({"meta": told, "rows": list(rows.values())}, indent=1) + "\n")
    sys.stdout.write(table.markdown(list(rows.values())) + "\n")


if __name__ == "__main__":
    main()
