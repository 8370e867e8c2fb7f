"""Engine times of two versions of the pack, in turn on one GPU; native is not measured.

    git worktree add /tmp/before COMMIT
    python benchmarks/between_versions.py --before /tmp/before --after . --comfyui ~/ComfyUI --base /tmp/m --out o.json

Each turn is a process of its own that runs the version's own code and ``benchmarks/networks.py``. Both versions share
the models below ``--base``; each has engines of its own there, which its first turn compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BATCHES = (2, 1)
STEPS = {"sd15": ((0, 1, 2, 4), 20), "sdxl": ((0, 1, 2), 10)}
"""ControlNets in a step, and steps of each sampling."""


def one_turn(options: argparse.Namespace) -> dict[str, Any]:
    """Case -> milliseconds of three repetitions each, host microseconds, errors; in the version at ``--pack``."""
    sys.path.insert(0, str(options.pack / "benchmarks"))
    import networks
    import torch
    from timing import gpu_ms, host_us, matmul_tflops

    networks.import_pack(options.comfyui)
    from comfy import model_management
    from hybrid_trt.engine_library import Library

    rows: dict[str, Any] = {"matmul_tflops": round(matmul_tflops())}
    counts, steps = STEPS[options.family]
    with torch.inference_mode():
        bench = networks.Bench(options.family, options.base, max(counts))
        bench.library = Library([options.base / f"engines_of_{options.name}"])
        for name, network in bench.networks.items():
            model_management.load_models_gpu([network.patcher])
            session = bench.session(name)
            session.begin_run(network.patcher)
            build_s, _ = bench.build(name)
            session.begin_run(network.patcher)
            for batch in BATCHES:
                given = bench.given(name, batch)
                reference = bench.native_call(name, given)
                rows[f"{options.family}_{name}_b{batch}"] = {
                    "ms": [gpu_ms(lambda: session.run(given))["median"] for _ in range(3)],  # noqa: B023
                    "host_us": host_us(lambda: session.run(given)),  # noqa: B023
                    "rel_err": networks.worst_error(list(session.run(given).values()), reference),
                    "build_s": round(build_s, 1)}
        for count in counts:
            setup = bench.conditioning(count, True)
            bench.sample(setup, 1, 6)
            medians = [statistics.median(bench.sample(setup, seed, steps)[1][2:]) for seed in (2, 3, 4)]
            rows[f"{options.family}_step_{count}cn"] = {"ms": [round(ms, 4) for ms in medians]}
    return rows


def summary(turns: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per case: the medians of both versions' repetitions, and their ratio."""
    rows = []
    for case, found in turns["before"][0].items():
        if not isinstance(found, dict):
            continue
        ms = {name: [value for turn in its for value in turn[case]["ms"]] for name, its in turns.items()}
        before, after = (round(statistics.median(ms[name]), 4) for name in ("before", "after"))
        rows.append({"case": case, "before_ms": before, "after_ms": after, "ratio": round(after / before, 4), "ms": ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--pack", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--family", choices=STEPS, default="sd15")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.pack:
        options.out.write_text(json.dumps(one_turn(options)))
        return
    turns: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for _ in range(options.turns):
        for name in ("after", "before"):
            command = [sys.executable, __file__, "--pack", str(getattr(options, name).resolve()), "--name", name,
                       "--comfyui", str(options.comfyui.resolve()), "--base", str(options.base.resolve()),
                       "--family", options.family, "--out", str(options.out)]
            subprocess.run(command, check=True)
            turns[name].append(json.loads(options.out.read_text()))
    rows = summary(turns)
    options.out.write_text(json.dumps({"rows": rows, "turns": turns}, indent=1) + "\n")
    for row in rows:
        sys.stdout.write(f"{row['case']}: {row['before_ms']} -> {row['after_ms']} ms ({row['ratio']})\n")


if __name__ == "__main__":
    main()
