"""One picture or video on two GPUs that share its tokens: whole prompts in a real ComfyUI server, beside one GPU.

    python benchmarks/shared_tokens.py --comfyui ~/ComfyUI --base /tmp/benchmark --out shared_tokens.json

*MultiGPU CFG Split* stands before *TRT Accelerate*, which builds first; cfg is 1. All ways of a case run in one server.
``--changing`` queues so many more prompts that change between one and two GPUs. Weights are random; ``--tiny`` tries
all of it on a CPU, where the second GPU is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import first_minutes
import numpy
import torch
from comfy_process import ComfyProcess, History
from first_minutes import STEPS, Bench
from prompts import node, relative_difference

WAYS = {"stock": ("stock", 1), "one": ("build first", 1), "two": ("build first", 2)}
"""Name -> way of ``first_minutes`` and number of GPUs."""
SETTLING, RUNS = 1, 3
"""Prompts of each way that are not timed, and that are."""
SHORT = 4
"""Steps of a prompt among ``--changing``."""


def queued(bench: Bench, comfy: ComfyProcess, way: str, seed: int, steps: int) -> History:
    kind, gpus = WAYS[way]
    prompt = bench.prompt(comfy, kind, seed, bench.size, bench.case.tokens, 0.0)
    prompt["sampler"]["inputs"]["steps"] = steps
    if gpus > 1:
        prompt["split"] = node("MultiGPU_WorkUnits", model=["model", 0], max_gpus=gpus)
        prompt["accelerate"]["inputs"]["model"] = ["split", 0]
    ended = comfy.queue(prompt, timeout=600)
    if not ended.ok:
        raise RuntimeError(f"{way}: {ended.error}\n{ended.traceback}")
    return ended


def latent(ended: History) -> numpy.ndarray:
    return numpy.load(ended.output("save", "latent")[0])


def used_gb(bench: Bench) -> list[float]:
    """GB that are taken of each GPU."""
    if bench.options.tiny:
        return []
    sizes = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
    return [round((whole - free) / 1e9, 2) for free, whole in sizes]


def measure(bench: Bench) -> dict[str, Any]:
    """The ways one after another: seconds of a prompt and of a step, distance from stock, and who computed."""
    row: dict[str, Any] = {"case": bench.name}
    latents: dict[str, numpy.ndarray] = {}
    steps = STEPS[bench.case.network]
    with bench._server("shared_tokens") as comfy:
        for way in WAYS:
            first = queued(bench, comfy, way, 1, steps)
            latents[way] = latent(first)
            if way == "stock":  # the picture alone
                continue
            few, many = [], []
            for number in range(SETTLING):
                queued(bench, comfy, way, 10 + number, steps)
            for number in range(RUNS):
                few.append(queued(bench, comfy, way, 20 + number, steps // 2).seconds)
                many.append(queued(bench, comfy, way, 30 + number, steps))
            seconds = statistics.median(one.seconds for one in many)
            row |= {f"{way}_first_s": round(first.seconds, 2), f"{way}_s": round(seconds, 3),
                    f"{way}_step_s": round((seconds - statistics.median(few)) / (steps - steps // 2), 4),
                    f"{way}_used_gb": used_gb(bench)}  # fmt: skip
            row[f"{way}_rel_err"] = round(relative_difference(latents[way], latents["stock"]), 5)
            report = many[-1].output("report", "report")[0]
            row[f"{way}_ran"] = [(one["backend"], one["engine"], one["native"], one.get("remark", ""))
                                 for one in report["rows"]]  # fmt: skip
        if count := bench.options.changing:
            row |= changing(bench, comfy, count)
    return row


def changing(bench: Bench, comfy: ComfyProcess, count: int) -> dict[str, Any]:
    """Prompts that change between one and two GPUs: the largest distance between both, and memory after some."""
    errors, used, before = [], [], None
    for number in range(count):
        value = latent(queued(bench, comfy, ("one", "two")[number % 2], 100 + number // 2, SHORT))
        if number % 2:
            errors.append(relative_difference(value, before))
        before = value
        if number % 10 in (0, 1):
            used.append(used_gb(bench))
    return {"changing": count, "changing_rel_err": round(max(errors, default=0.0), 5), "changing_used_gb": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="where models and outputs go")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["flux1_1024", "wan22_480_81_fp8"], help="of large_models.py")
    parser.add_argument("--changing", type=int, default=0, help="prompts that change between one and two GPUs")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    meta = first_minutes.about("shared_tokens.py", first_minutes.prepare(options))
    rows = []
    for name in options.cases:
        bench = Bench(name, options)
        shutil.rmtree(options.base / "models" / "trt_engines", ignore_errors=True)
        rows.append(measure(bench))
        print({key: value for key, value in rows[-1].items() if not re.search("_ran$|used_gb", key)}, flush=True)
        options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        bench.remove()


if __name__ == "__main__":
    main()
