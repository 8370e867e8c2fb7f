"""What the GPU's memory goes to: native and with engines of the torch backend, one more ControlNet at a time.

    python benchmarks/memory_parts.py --family sd15 --comfyui ~/ComfyUI --base /tmp/benchmark --out memory_parts.json

Native and engines have a process each, since what CUDA loads once stays. Each row tells in MB what is in use afterwards
and the most meanwhile, by everyone on that GPU: be alone on it. The engines are those that ``run.py`` built.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import torch
from timing import PeakMemory

STEPS = 4
KINDS = ("native", "engines")


def stages(bench: networks.Bench, engines: bool, controls: int) -> list[tuple[str, Callable[[], Any]]]:
    """What is done in turn: each name with a call."""
    from comfy import model_management

    patchers = [network.patcher for network in bench.networks.values()]
    found = [("weights of the UNet and a ControlNet", lambda: model_management.load_models_gpu(patchers))]
    for count in range(controls + 1):
        setup = bench.conditioning(count, engines)
        for time in ("first", "second"):
            what = f"{time} sampling with {count} ControlNets"
            found.append((what, lambda setup=setup: bench.sample(setup, 1, steps=STEPS)))
    return found


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one kind, in this process."""
    torch.zeros(1, device="cuda")  # CUDA itself is there: it is not counted
    memory, rows = PeakMemory(), []
    networks.import_pack(options.comfyui)
    with torch.inference_mode():
        bench = networks.Bench(options.family, options.base, options.controls)
        for what, call in stages(bench, options.kind == "engines", options.controls):
            with memory:
                call()
                torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what torch merely keeps is nobody's need
            rows.append({"kind": options.kind, "what": what, "peak_mb": memory.peak, "after_mb": memory.used_now,
                         "torch_mb": round(torch.cuda.memory_allocated() / 1e6, 1)})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=networks.SIZES, required=True)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--controls", type=int, default=2)
    parser.add_argument("--kind", choices=KINDS, help="only these, in this process")
    options = parser.parse_args()
    if options.kind:
        options.out.write_text(json.dumps(measure(options), indent=1) + "\n")
        return
    rows = []
    for kind in KINDS:
        part = options.out.with_name(f"{options.out.stem}_{kind}.json")
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--kind", kind, "--out", str(part)], check=True)
        rows += json.loads(part.read_text())
        part.unlink()
    command = "python benchmarks/memory_parts.py --family ... --comfyui ... --base ... --out ..."
    options.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
