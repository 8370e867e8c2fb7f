"""Models larger than the card: whole prompts with little GPU memory free, native against engines.

    python benchmarks/small_cards.py --comfyui ~/ComfyUI --base /tmp/benchmark --out small_cards.json --free 8 12

Another process takes the GPU's memory but for so many GB, so a large card stands for a small one with a link as fast.
Each way (*stock* nodes, and TRT Accelerate with *build first*) has a server of its own, with default flags or
``--flags``. ``--changing`` queues so many short prompts in one server instead: the models of all cases by turns, two
sizes, a LoRA put in and out.

    python benchmarks/small_cards.py --my-card --comfyui ~/ComfyUI

This measures your own card as it is, of 8 GB or more, and prints a table. Nothing is downloaded;
models with random weights lie in ``build`` for so long (7 GB).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Timer
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import first_minutes
import numpy
import psutil
import torch
from comfy_process import ComfyProcess
from first_minutes import STEPS, Bench
from prompts import relative_difference
from timing import PeakMemory

_HOLD = """
import sys, time, torch

def take(left):
    held = []
    while (size := torch.cuda.mem_get_info()[0] - int(left * 1e9)) > 1 << 24:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return held

torch.empty(1, device="cuda")
held = take(float(sys.argv[1]))
print("held", flush=True)
for line in sys.stdin:
    left, seconds = map(float, line.split())
    more = take(left)
    time.sleep(seconds)
    del more
    torch.cuda.empty_cache()
"""
RUNS = 3
MY_CARD = {"zimage_1024_fp8": "Z-Image fp8, 1024 px, 8 steps", "sdxl_1024": "SDXL, 1024 px, 20 steps at cfg 1"}
"""Cases of ``--my-card`` in words, quick builds first."""
NEEDS = {"GPU memory": 5, "main memory": 10, "disk space": 9}
"""Free gigabytes that these need."""
NEXT_WITHIN = 150.0
"""Seconds after which no further model begins: so a slow card runs one model alone."""


@contextmanager
def ballast(free_gb: float) -> Iterator[subprocess.Popen[str]]:
    """Inside, a process holds the GPU's memory but for so many GB. A line of its input has it take more for a time."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(free_gb)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        if process.stdout.readline().strip() != "held":
            raise RuntimeError("the GPU's memory could not be taken")
        yield process
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


def private_bytes(process: int) -> int:
    """Main memory that a process has for itself: without pages of files, which the system may drop."""
    memory = psutil.Process(process).memory_info()
    return memory.rss - getattr(memory, "shared", 0)  # Windows does not tell


def taken(bench: Bench, way: str, comfy: ComfyProcess, other: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Prompts during which ``other`` takes memory for half a second; returns how far they are from one without that.

    They are the same prompt, bar a part of ``denoise`` that ComfyUI ignores: it would not run one twice.
    """
    count, latents, errors = bench.options.taken, [], []

    def take() -> None:
        other.stdin.write("0.3 0.5\n")
        other.stdin.flush()

    for number in range(count + 1):
        if number:
            Timer((number - 0.5) / count * seconds, take).start()
        prompt = bench.prompt(comfy, way, 50, bench.size, bench.case.tokens, 0.0)
        prompt["sampler"]["inputs"]["denoise"] = 1 - 1e-6 * number
        ended = comfy.queue(prompt, timeout=600)
        errors += [] if ended.ok else [str(ended.error)[:200]]
        latents += [numpy.load(ended.output("save", "latent")[0])] if ended.ok else []
        time.sleep(0.6)
    found = [round(relative_difference(one, latents[0]), 5) for one in latents]
    return {"taken_errors": errors, "taken_rel_err": found}


def run(bench: Bench, way: str, free_gb: float, other: subprocess.Popen[str] | None) -> dict[str, Any]:
    """The prompts of one way in one server: the first, warm ones, another size, a LoRA, and without it again.

    Before the warm ones come two in which the pack times the engine and native, to take the faster.
    """
    flags = {"flags": bench.options.flags} if bench.options.flags else {}
    row: dict[str, Any] = {"case": bench.name, "way": way, "free_gb": free_gb, **flags}
    plan = [("first", 1, bench.size, 0.0, 1), ("timed", 2, bench.size, 0.0, 2), ("warm", 10, bench.size, 0.0, RUNS),
            ("size_first", 17, bench.other, 0.0, 1), ("size_timed", 18, bench.other, 0.0, 2),
            ("size_warm", 21, bench.other, 0.0, RUNS), ("lora_first", 27, bench.size, 0.5, 1),
            ("lora_timed", 28, bench.size, 0.5, 2), ("lora_warm", 31, bench.size, 0.5, RUNS),
            ("last", 40, bench.size, 0.0, RUNS)]  # fmt: skip
    plan = [asked for asked in plan if asked[0] in (bench.options.prompts or asked)]
    memory = PeakMemory() if other else contextlib.nullcontext()
    with bench._server(f"{way}_{free_gb:g}") as comfy, memory:
        for label, seed, size, lora, count in plan:
            if label == "last" and other:
                row["peak_mb"] = memory.peak
                row |= taken(bench, way, comfy, other, row["warm"])
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
                row["reasons"] = [reason for one in report["rows"] for reason in one["reasons"]]
        row["private_memory_gb"] = round(private_bytes(comfy.pid) / 1e9, 2)
        row.setdefault("peak_mb", getattr(memory, "peak", None))
    row["step"] = round(row["warm"] / STEPS[bench.case.network], 4)
    return row


def changing(benches: list[Bench], way: str, free_gb: float) -> dict[str, Any]:
    """Prompts of changing models in one server: seconds, errors, who computed, and memory after each."""
    row: dict[str, Any] = {"case": [bench.name for bench in benches], "way": way, "free_gb": free_gb, "seconds": [],
                           "errors": [], "engine_calls": [], "native_calls": [], "private_memory_gb": [],
                           "free_after_gb": []}  # fmt: skip
    with benches[0]._server(f"changing_{way}_{free_gb:g}") as comfy:
        for number in range(benches[0].options.changing):
            turn, at = divmod(number, len(benches))
            bench = benches[at]
            prompt = bench.prompt(comfy, way, 100 + number, (bench.size, bench.other)[turn % 2], bench.case.tokens,
                                  (0.0, 0.5, 0.8)[turn % 3])  # fmt: skip
            prompt["sampler"]["inputs"]["steps"] = 4
            ended = comfy.queue(prompt, timeout=600)
            row["seconds"].append(round(ended.seconds, 2))
            if not ended.ok:
                row["errors"].append((number, str(ended.error)[:200]))
            elif way != "stock":
                report = ended.output("report", "report")[0]["rows"]
                for calls in ("engine", "native"):
                    row[f"{calls}_calls"].append(sum(one[calls] for one in report))
            row["private_memory_gb"].append(round(private_bytes(comfy.pid) / 1e9, 2))
            if not bench.options.tiny:
                row["free_after_gb"].append(round(torch.cuda.mem_get_info()[0] / 1e9, 2))
    return row


def this_machine(base: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what a result file says of this machine, and its free gigabytes of what NEEDS names."""
    free = {"GPU memory": torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0.0,
            "main memory": psutil.virtual_memory().available, "disk space": shutil.disk_usage(base).free}  # fmt: skip
    return first_minutes.about("small_cards.py", ["--my-card"]), {what: size / 1e9 for what, size in free.items()}


def lacking(free: dict[str, float]) -> str:
    """Return what a machine has too little of, or nothing."""
    return ", ".join(f"{free[what]:.1f} GB of {what} are free and {least} are needed"
                     for what, least in NEEDS.items() if free[what] < least)  # fmt: skip


def make_files(name: str, options: argparse.Namespace) -> None:
    """Write a case's files."""
    first_minutes.let_comfyui_be_imported(options)
    Bench(name, options)


def elsewhere(call: Any, *arguments: Any) -> Any:
    """Return a call's result from a process of its own, so that this one holds none of the GPU's memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def table_row(words: str, native: dict[str, Any], engine: dict[str, Any]) -> str:
    """Return a row of the table: seconds of a warm prompt without and with engines, or why none ran."""
    if not any(calls for _, calls, _ in engine["warm_ran"]):
        return f"| {words} | {native['warm']:.2f} s | not accelerated: {', '.join(engine['reasons'])} | | |"
    return (f"| {words} | {native['warm']:.2f} s | {engine['warm']:.2f} s | {native['warm'] / engine['warm']:.2f}x | "
            f"{engine['warm_rel_err']:.1%} |")  # fmt: skip


def measured(options: argparse.Namespace) -> list[str]:
    """Measure the cases on this card as it is, and keep all figures in a file; return a table."""
    began, rows = time.monotonic(), []
    meta, free = elsewhere(this_machine, options.base)
    if not options.tiny and (short := lacking(free)):
        raise SystemExit(f"Too small for these models: {short}. Close other programs, ComfyUI too.")
    print(f"{meta['gpu']}, {free['GPU memory']:.1f} GB free\n", flush=True)
    table = ["| model | normal | with engines | faster | latents differ by |", "|---" * 5 + "|"]
    for name in options.cases:
        words = MY_CARD.get(name, name)
        if rows and time.monotonic() - began > NEXT_WITHIN:
            print(f"{words}: left out for time; --cases {name} measures it", flush=True)
            continue
        print(f"{words}: makes weights, runs {2 * (3 + RUNS)} prompts and builds ...", flush=True)
        try:
            elsewhere(make_files, name, options)
            bench = Bench(name, options, made=True)
            rows += (run(bench, way, round(free["GPU memory"], 1), None) for way in ("stock", "build first"))
        except (AssertionError, RuntimeError, OSError) as failed:
            print(f"{words}: {failed}\n{options.logs} has the server's logs.", flush=True)
            continue
        bench.remove()
        table += [table_row(words, *rows[-2:])]
        options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return table


def my_card(options: argparse.Namespace) -> None:
    """Measure this card with models that are deleted in the end, and print the table."""
    options.base.mkdir(parents=True, exist_ok=True)
    try:
        table = measured(options)
    finally:
        shutil.rmtree(options.base, ignore_errors=True)
    print("\n".join(["", *table, "", f"{options.out} has all figures."]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--my-card", action="store_true", help="measure this card as it is")
    parser.add_argument("--base", type=Path, help="where models and outputs go")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", help="of large_models.py, by default zimage_1024")
    parser.add_argument("--free", nargs="+", type=float, default=[8, 12], help="GB")
    parser.add_argument("--ways", nargs="+", default=["stock", "build first"])
    parser.add_argument("--taken", type=int, default=10, help="prompts during which another process takes memory")
    parser.add_argument("--prompts", nargs="+", help="only these: first timed warm size_first ...")
    parser.add_argument("--changing", type=int, help="prompts of changing models")
    parser.add_argument("--flags", nargs="+", default=[], help="of the servers, without their dashes: novram")
    parser.add_argument("--decode", help="the VAE that prompts end with, of vae.py: wan21")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.my_card:
        build = options.base or Path(__file__).resolve().parent.parent / "build"
        options.base, options.out = build / "my_card", options.out or build / "my_card.json"
        options.prompts, options.cases = ["first", "timed", "warm"], options.cases or list(MY_CARD)
        first_minutes.prepare(options)
        return my_card(options)
    if not options.base or not options.out:
        parser.error("--base and --out are needed")
    options.cases = options.cases or ["zimage_1024"]
    arguments = first_minutes.prepare(options)
    meta = first_minutes.about("small_cards.py", arguments) | ({} if options.tiny else {"link_gb_s": link_gb_s()})
    rows = []
    for names in [options.cases] if options.changing else [[name] for name in options.cases]:
        benches = [Bench(name, options) for name in names]
        shutil.rmtree(options.base / "models" / "trt_engines", ignore_errors=True)
        for free in options.free:
            with contextlib.nullcontext() if options.tiny else ballast(free) as other:
                for way in options.ways:
                    rows.append(changing(benches, way, free) if options.changing else run(benches[0], way, free, other))
                    print({key: value for key, value in rows[-1].items() if not key.endswith("_ran")}, flush=True)
                    options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        for bench in benches:
            bench.remove()


if __name__ == "__main__":
    main()
