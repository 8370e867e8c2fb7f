"""Models larger than the card: whole prompts with little GPU memory free, native against engines.

    python benchmarks/small_cards.py --comfyui ~/ComfyUI --base /tmp/benchmark --out small_cards.json --free 8 12

Another process takes the GPU's memory but for so many GB, so a large card stands for a small one with a link as fast.
Each way (*stock* nodes, and TRT Accelerate with *build first*) has a server of its own, with default flags.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import first_minutes
import psutil
import torch
from first_minutes import STEPS, Bench
from prompts import relative_difference
from timing import PeakMemory

_HOLD = """
import sys, torch
left = float(sys.argv[1])
torch.empty(1, device="cuda")
held = []
while (size := torch.cuda.mem_get_info()[0] - int(left * 1e9)) > 1 << 24:
    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
print("held", flush=True)
sys.stdin.read()
"""
RUNS = 3


@contextmanager
def ballast(free_gb: float) -> Iterator[None]:
    """Inside, a process holds the GPU's memory but for so many GB."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(free_gb)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        if process.stdout.readline().strip() != "held":
            raise RuntimeError("the GPU's memory could not be taken")
        yield
    finally:
        process.stdin.close()
        process.wait(60)


def link_gb_s() -> float:
    """GB a second from pinned main memory to the GPU."""
    here = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        there.copy_(here, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round((1 << 30) / 1e6 / statistics.median(times), 1)


def run(bench: Bench, way: str, free_gb: float) -> dict[str, Any]:
    """The prompts of one way in one server: the first, warm ones, another size, a LoRA, and without it again."""
    import numpy

    row: dict[str, Any] = {"case": bench.name, "way": way, "free_gb": free_gb}
    plan = [("first", 1, bench.size, 0.0, 1), ("warm", 10, bench.size, 0.0, RUNS),
            ("size_first", 20, bench.other, 0.0, 1), ("size_warm", 21, bench.other, 0.0, RUNS),
            ("lora_first", 30, bench.size, 0.5, 1), ("lora_warm", 31, bench.size, 0.5, RUNS),
            ("last", 40, bench.size, 0.0, RUNS)]  # fmt: skip
    memory = contextlib.nullcontext() if bench.options.tiny else PeakMemory()
    with bench._server(f"{way}_{free_gb:g}") as comfy, memory:
        for label, seed, size, lora, count in plan:
            ended = [bench._queue(comfy, way, seed + i, size, bench.case.tokens, lora) for i in range(count)]
            row[label] = round(statistics.median(one.seconds for one in ended), 3)
            value = numpy.load(ended[-1].output("save", "latent")[0])
            if way == "stock":
                bench.stock[label] = value
            elif label in bench.stock:
                row[f"{label}_rel_err"] = round(relative_difference(value, bench.stock[label]), 5)
            if way != "stock":
                report = ended[-1].output("report", "report")[0]
                row[f"{label}_ran"] = [(one["backend"], one["engine"], one["native"]) for one in report["rows"]]
                row["said"] = list(filter(None, (one.get("remark") for one in report["rows"]))) or row.get("said", [])
        row["main_memory_gb"] = round(psutil.Process(comfy.pid).memory_info().rss / 1e9, 2)
    row["step"] = round(row["warm"] / STEPS[bench.case.network], 4)
    if not bench.options.tiny:
        row["peak_mb"] = memory.peak
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="where models and outputs go")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["zimage_1024"], help="of large_models.py")
    parser.add_argument("--free", nargs="+", type=float, default=[8, 12], help="GB")
    parser.add_argument("--ways", nargs="+", default=["stock", "build first"])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    arguments = first_minutes.prepare(options)
    meta = first_minutes.about("small_cards.py", arguments) | ({} if options.tiny else {"link_gb_s": link_gb_s()})
    rows = []
    for name in options.cases:
        bench = Bench(name, options)
        shutil.rmtree(options.base / "models" / "trt_engines", ignore_errors=True)
        for free in options.free:
            with contextlib.nullcontext() if options.tiny else ballast(free):
                for way in options.ways:
                    rows.append(run(bench, way, free))
                    print({key: value for key, value in rows[-1].items() if not key.endswith("_ran")}, flush=True)
                    options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        bench.remove()


if __name__ == "__main__":
    main()
