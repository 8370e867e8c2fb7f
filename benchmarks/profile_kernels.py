"""Which kernels a replayed CUDA graph spends its time in, family by family: what is worth making faster.

    python benchmarks/profile_kernels.py --family sd15 --comfyui ~/ComfyUI --base /tmp/benchmark --out profile.json

Engines of the torch backend, built unless the library below ``--base`` has them; each network at batch 2.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import networks
import torch

REPLAYS = 20
FAMILIES = (
    ("attention", r"flash|fmha|sdpa|mha_|attention"),
    ("convolution", r"fprop|dgrad|conv2d|convolve|implicit_convolve|cudnn.*conv|nchwToNhwc|nhwcToNchw"),
    ("product", r"gemm|nvjet|cutlass|cublas|splitk|splitKreduce|triton_tem"),
    ("norm", r"group_norm|layer_norm|native_layer|var_mean|triton_(red|per)_"),
    ("copy", r"^(?!triton).*(memcpy|memset|copy_|Memcpy|Memset|CatArray)"),
    ("pointwise", r"triton_poi|elementwise|vectorized"),
)
"""The first whose pattern a kernel's name has; Inductor names its own after the operations in them."""


def family_of(kernel: str) -> str:
    """The family of a kernel, by its name."""
    return next((name for name, pattern in FAMILIES if re.search(pattern, kernel)), "other")


def grouped(kernels: Iterable[tuple[str, float]], replays: int) -> dict[str, dict[str, float]]:
    """Family -> launches and milliseconds of one replay, the longest first.

    Args:
        kernels: name and microseconds of each launch of all replays.
    """
    count, time = defaultdict(int), defaultdict(float)
    for name, microseconds in kernels:
        family = family_of(name)
        count[family] += 1
        time[family] += microseconds / 1000
    ordered = sorted(time, key=time.__getitem__, reverse=True)
    return {f: {"launches": round(count[f] / replays, 1), "ms": round(time[f] / replays, 4)} for f in ordered}


def longest(kernels: Iterable[tuple[str, float]], replays: int, most: int = 40) -> list[dict[str, Any]]:
    """The kernels that take most of a replay, those of one name together."""
    count, time = defaultdict(int), defaultdict(float)
    for name, microseconds in kernels:
        count[name] += 1
        time[name] += microseconds / 1000
    ordered = sorted(time, key=time.__getitem__, reverse=True)[:most]
    return [{"kernel": n[:160], "family": family_of(n), "launches": round(count[n] / replays, 1),
             "ms": round(time[n] / replays, 4)} for n in ordered]


def launches(call: Any, replays: int = REPLAYS) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel of so many calls."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(replays):
            call()
        torch.cuda.synchronize()
    return [(event.name, event.device_time_total) for event in found.events() if event.device_time_total]


def profile_row(bench: networks.Bench, name: str) -> dict[str, Any]:
    """The kernels of one network's replay."""
    from comfy import model_management

    with torch.inference_mode():
        network = bench.networks[name]
        model_management.load_models_gpu([network.patcher])
        session = bench.session(name)
        session.begin_run(network.patcher)
        bench.build(name)
        given = bench.given(name, 2)
        session.begin_run(network.patcher)
        session.run(given)
        whole = networks.gpu_ms(lambda: session.run(given))["median"]
        alone = networks.replay_ms(session)
        graph = next(reversed(session.graphs._captured.values()))
        kernels = launches(graph.replay.replay)
    row = {"case": f"{bench.family}_{name}", "batch": 2, "call_ms": whole, "replay_ms": alone,
           "kernels_ms": round(sum(time for _, time in kernels) / 1000 / REPLAYS, 4),
           "families": grouped(kernels, REPLAYS), "longest": longest(kernels, REPLAYS)}
    print({k: v for k, v in row.items() if k != "longest"}, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=networks.SIZES, required=True)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    networks.import_pack(options.comfyui)
    with torch.inference_mode():
        bench = networks.Bench(options.family, options.base, 1)
    rows = [profile_row(bench, name) for name in bench.networks]
    found = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
