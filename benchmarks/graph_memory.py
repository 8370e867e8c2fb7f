"""What CUDA graphs keep of a GPU between two samplings, and what it costs to give that back after each.

    python benchmarks/graph_memory.py --comfyui ~/ComfyUI --base /tmp/benchmark --out graph_memory.json

A graph that was recorded under cudaMallocAsync, ComfyUI's usual allocator, allocates as it runs; what it took stays for
its next replay, also while the VAE decodes, unless it is given back (``sessions/cuda_capture.py``). SD1.5 with
two ControlNets at 512x512, 20 steps; the engines are those that ``run.py`` built. Samplings after which memory is given
back, and others, take turns; the one after each is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import networks
import torch
from timing import PeakMemory

TURNS = 12


def milliseconds(call: Any) -> float:
    """The host's time until the GPU is done."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1000


def measure(bench: networks.Bench) -> dict[str, Any]:
    """What is kept and given back, in MB, and the milliseconds of samplings that follow."""
    from hybrid_trt.sampling import device_inputs
    from hybrid_trt.sessions import cuda_capture

    gpu, give_back = torch.device("cuda", 0), cuda_capture.give_back_graph_memory
    device_inputs.give_back_graph_memory = lambda _device: 0  # which a sampling does at its end
    setup, memory = bench.conditioning(2, True), PeakMemory()
    for _ in range(3):
        reference, _ = bench.sample(setup, 1)
    figures = {"kept_mb": cuda_capture.graph_memory(0) / 1e6, "used_mb": memory.used_now}
    give_back(gpu)
    figures |= {"left_mb": cuda_capture.graph_memory(0) / 1e6, "used_afterwards_mb": memory.used_now}
    again, _ = bench.sample(setup, 1)
    figures["equal"] = torch.equal(again, reference)
    after: dict[str, list[float]] = {"given_back": [], "kept": []}
    giving = []
    for seed in range(TURNS):
        giving.append(milliseconds(lambda: give_back(gpu)))
        for what in after:
            after[what].append(milliseconds(lambda: bench.sample(setup, seed)))  # noqa: B023
    return figures | {
        "giving_back_ms": round(statistics.median(giving), 3),
        **{f"sampling_{what}_ms": round(statistics.median(times), 3) for what, times in after.items()},
        "turns_ms": after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    with torch.inference_mode():
        found = measure(networks.Bench("sd15", options.base, 2))
    print({name: value for name, value in found.items() if name != "turns_ms"})
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
