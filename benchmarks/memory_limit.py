"""Engines on a card of a few gigabytes: what ComfyUI evicts, how long prompts take, what serves them.

    python benchmarks/memory_limit.py --comfyui ~/ComfyUI --base /tmp/memory --out memory.json \
        --pack before=/path/to/an/older/version --pack after=.

A process of its own holds all but N GB of the GPU, so ComfyUI, its allocators and the driver see a card of N GB.
Full-size SD1.5 (random weights, with text encoder and VAE), three prompts in a row with other texts and seeds, in both
of ComfyUI's ways to load weights, by

* ``native``: stock nodes; ``native_cn``: with a ControlNet;
* ``own``: an engine with weights of its own, played by a stand-in that runs on any GPU (memory_nodes/stand_in.py);
* ``own_cn``: the same with a ControlNet's engine beside it;
* ``torch``: the torch backend without a build; ``torch_cn`` with a ControlNet beside it.

With ``--cpu`` tiny models run through on the CPU, where ComfyUI evicts nothing: to try this script.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "tools"), str(ROOT / "tests" / "support")]

from comfy_process import ComfyProcess
from scenarios import Prompt, node

LEFT_OUT = shutil.ignore_patterns(".git", "build", "docs", "tests", "benchmarks", "__pycache__", "old_pack", "shared")
MODES = {"dynamic": [], "no_dynamic": ["--disable-dynamic-vram"]}
CASES = {"native": ("none", 0), "native_cn": ("none", 1), "own": ("stand_in", 0), "own_cn": ("stand_in", 1),
         "torch": ("torch", 0), "torch_cn": ("torch", 1)}
TEXTS = ("a lighthouse in a storm", "a harbour at noon", "an orchard in snow", "a desert road at night")
ENGINE = {"min_size": 64, "opt_size": 512, "max_size": 1024, "max_images": 4, "max_tokens": 616, "precision": "auto"}

HOG = """
import sys, torch
held, step = [], 64 << 20
torch.zeros(1, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    goal = float(line) * 1e9
    while held and torch.cuda.mem_get_info()[0] < goal - step:
        held.pop(); torch.cuda.empty_cache()
    while torch.cuda.mem_get_info()[0] >= goal + step:
        held.append(torch.empty(min(1 << 30, int(torch.cuda.mem_get_info()[0] - goal) & -step), dtype=torch.uint8,
                                device="cuda"))
    print(f"{torch.cuda.mem_get_info()[0] / 1e9:.2f} GB free", flush=True)
"""


class Hog:
    """Holds all but some of the GPU's memory, in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        self._process.stdout.readline()
        self.mb = used_mb()

    def make_card(self, gb: float) -> str:
        """Take memory until the server has ``gb`` in all; what it holds already counts."""
        server = used_mb() - self.mb
        self._process.stdin.write(f"{gb - server / 1e3}\n")
        self._process.stdin.flush()
        free = self._process.stdout.readline().strip()
        self.mb = used_mb() - server
        return f"the server has {server:.0f} MB, {free}"

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def say(text: str) -> None:
    """One progress line on stderr."""
    print(f"[memory_limit {time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def install(pack: Path, base: Path) -> None:
    """A copy of a version of the pack, with the stand-in among its backends, and this benchmark's nodes."""
    nodes = base / "custom_nodes"
    shutil.rmtree(nodes, ignore_errors=True)
    shutil.copytree(pack, nodes / "hybrid-trt", ignore=LEFT_OUT, symlinks=True)
    shutil.copy2(HERE / "memory_nodes" / "stand_in.py", nodes / "hybrid-trt" / "backends" / "stand_in.py")
    shutil.copytree(HERE / "memory_nodes", nodes / "memory_nodes", ignore=shutil.ignore_patterns("stand_in.py"))


@contextmanager
def server(options: argparse.Namespace, base: Path, mode: str, log: Path) -> Iterator[ComfyProcess]:
    """A server without the web front end."""
    page = base / "page"
    page.mkdir(parents=True, exist_ok=True)
    (page / "index.html").write_text("<html></html>")
    arguments = ["--front-end-root", str(page), *(MODES[mode] if not options.cpu else [])]
    with ComfyProcess(options.comfyui, base, arguments=arguments, log=log, cpu=options.cpu, start_timeout=300) as comfy:
        yield comfy


def prompt(case: str, turn: int, family: str, steps: int, size: int) -> Prompt:
    """One prompt of a case; texts and seed are another in each turn, so only loaders keep their outputs."""
    backend, controls = CASES[case]
    settings = {**ENGINE, "when_missing": "use native", "backend": backend}
    built: Prompt = {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name=f"{family}.safetensors"),
        "positive": node("CLIPTextEncode", clip=["checkpoint", 1], text=TEXTS[turn % len(TEXTS)] + f", {case} {turn}"),
        "negative": node("CLIPTextEncode", clip=["checkpoint", 1], text=f"blurry {case} {turn}"),
        "latent": node("EmptyLatentImage", width=size, height=size, batch_size=1),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["checkpoint", 2]),
        "image": node("SaveImage", images=["decode", 0], filename_prefix="memory"),
    }
    model, positive, negative = ["checkpoint", 0], ["positive", 0], ["negative", 0]
    if backend != "none":
        built["engine"] = node("TRTUNetEngine", model=model, **settings)
        built["patch"] = node("TRTSamplerPatch", model=model, engine=["engine", 0])
        built["report"] = node("TRTReport", after=["sampler", 0])
        model = ["patch", 0]
    if controls:
        built["net"] = node("ControlNetLoader", control_net_name=f"{family}_a.safetensors")
        net = ["net", 0]
        if backend != "none":
            built["net_engine"] = node("TRTControlNetEngine", control_net=net, **settings)
            net = ["net_engine", 0]
        built["hint"] = node("LoadImage", image="control_a.png")
        built["apply"] = node("ControlNetApplyAdvanced", positive=positive, negative=negative,
                              control_net=net, image=["hint", 0], strength=0.7, start_percent=0.0,
                              end_percent=1.0)
        positive, negative = ["apply", 0], ["apply", 1]
    built["sampler"] = node("KSampler", model=model, positive=positive, negative=negative, latent_image=["latent", 0],
                            seed=turn, steps=steps, cfg=7.5, sampler_name="euler", scheduler="normal", denoise=1.0)
    return built


def engines_prompt(family: str) -> Prompt:
    """Builds both stand-in engines."""
    return {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name=f"{family}.safetensors"),
        "unet": node("StandInUNetEngine", model=["checkpoint", 0]),
        "net": node("ControlNetLoader", control_net_name=f"{family}_a.safetensors"),
        "controlnet": node("StandInControlNetEngine", control_net=["net", 0]),
    }


def run_case(comfy: ComfyProcess, case: str, options: argparse.Namespace, family: str) -> list[dict[str, Any]]:
    """The case's prompts in a row, each with what ComfyUI did meanwhile."""
    rows = []
    size, steps = (128, 2) if options.cpu else (512, options.steps)
    for turn in range(options.prompts):
        comfy.get("/memory_limit/events")
        with peak(options) as memory:
            history = comfy.queue(prompt(case, turn, family, steps, size), timeout=300)
        told = comfy.get("/memory_limit/events")
        report = history.outputs.get("report", {}).get("report", [{}])[0]
        rows.append({
            "prompt": turn + 1, "status": history.status, "error": history.error, "seconds": round(history.seconds, 2),
            "peak_mb": round(memory.peak) if memory is not None else 0,
            "unloaded": freed(told["events"]), "loaded": told["loaded"], "events": told["events"],
            "served": {f"{row['kind']}": [row["engine"], row["native"], row["reasons"]]
                       for row in report.get("rows", [])},
        })  # fmt: skip
        say(f"{case} {turn + 1}: {history.status} {history.seconds:.2f} s, unloaded {rows[-1]['unloaded']}")
    return rows


def peak(options: argparse.Namespace) -> Any:
    """The most memory that the GPU's users but the hog hold meanwhile."""
    if options.cpu:
        return nullcontext()
    from timing import PeakMemory

    memory = PeakMemory()
    memory.before = options.hog_mb
    return memory


def freed(events: list[dict[str, Any]]) -> dict[str, int]:
    """Model -> megabytes that ComfyUI took from it."""
    sums: dict[str, int] = {}
    for event in events:
        if event["what"].startswith("unload"):
            sums[event["name"]] = sums.get(event["name"], 0) - event["mb"]
    return {name: mb for name, mb in sums.items() if mb > 0}


def used_mb() -> float:
    """Memory of the GPU that is in use, by whomever."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used / 1e6


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All packs, modes and cases; each mode of a pack in a server of its own."""
    import models
    import tiny_models

    family = "tiny_sd15" if options.cpu else "full_sd15"
    base = options.base
    if options.cpu:
        sys.path.append(str(options.comfyui))
        tiny_models.make_images(base / "input")
        tiny_models.make(base / "models", ["tiny_sd15", "tiny_sd15_a"])
    else:
        models.make(options.comfyui, base, ["full_sd15", "full_sd15_a"])
    rows: list[dict[str, Any]] = []
    for name, pack in options.pack:
        install(pack, base)
        for mode in options.modes:
            shutil.rmtree(base / "models" / "trt_engines", ignore_errors=True)
            hog = None if options.cpu else Hog()
            try:
                with server(options, base, mode, options.out.parent / f"memory_{name}_{mode}.log") as comfy:
                    if any(CASES[case][0] == "stand_in" for case in options.cases):
                        made = comfy.queue(engines_prompt(family), timeout=300)
                        if not made.ok:
                            raise RuntimeError(f"no stand-in engines: {made.error}\n{made.traceback}")
                    for gb in options.gb:
                        for case in options.cases:
                            comfy.free()
                            if hog is not None:
                                time.sleep(1)
                                say(f"{name} {mode} {case}: a card of {gb} GB, {hog.make_card(gb)}")
                                options.hog_mb = hog.mb
                            found = run_case(comfy, case, options, family)
                            rows += [{"pack": name, "mode": mode, "gb": gb, "case": case} | row for row in found]
                            write(options, rows)
            finally:
                if hog is not None:
                    hog.end()
    return rows


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """All rows so far, with what they depend on."""
    import torch

    meta = {"gpu": "none" if options.cpu else torch.cuda.get_device_name(0), "torch": torch.__version__,
            "command": " ".join(["python benchmarks/memory_limit.py", *sys.argv[1:]])}
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    os.replace(temporary, options.out)


def table(rows: list[dict[str, Any]]) -> str:
    """A line per case: its prompts side by side."""
    lines = ["| pack | mode | GB | case | seconds | peak MB | evicted per prompt (MB) | engine/native calls |",
             "|---|---|---|---|---|---|---|---|"]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["pack"], row["mode"], row["gb"], row["case"]), []).append(row)
    for key, group in groups.items():
        seconds = " ".join("failed" if row["status"] != "success" else f"{row['seconds']:.1f}" for row in group)
        evicted = "; ".join(", ".join(f"{n} {mb}" for n, mb in row["unloaded"].items()) or "-" for row in group)
        last = group[-1]["served"]
        served = ", ".join(f"{kind} {e}/{n} {' '.join(why)}".strip() for kind, (e, n, why) in last.items()) or "-"
        peaks = max(row["peak_mb"] for row in group)
        lines.append(f"| {' | '.join(map(str, key))} | {seconds} | {peaks} | {evicted} | {served} |")
    return "\n".join(lines)


def named(text: str) -> tuple[str, Path]:
    """``name=folder``."""
    name, _, folder = text.rpartition("=")
    return name or "pack", Path(folder).resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("HYBRID_TRT_COMFYUI"), help="ComfyUI's folder")
    parser.add_argument("--base", type=Path, required=True, help="a folder for models and outputs, 6 GB")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write; logs go beside it")
    parser.add_argument("--pack", type=named, action="append", help="name=folder of a version; default: this one")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gb", nargs="+", type=float, default=[5.0], help="sizes of the card")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU, to try this script")
    options = parser.parse_args()
    for name in ("comfyui", "base", "out"):
        setattr(options, name, Path(getattr(options, name)).resolve())
    options.pack = options.pack or [("pack", ROOT)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = measure(options)
    print(table(rows))
    if options.cpu:
        print("On the CPU: nothing is evicted there, so this shows only that the script runs.")
    return 1 if any(row["status"] != "success" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
