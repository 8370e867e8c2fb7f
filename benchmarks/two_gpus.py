"""SDXL at 1024 px on one GPU and shared among two by MultiGPU CFG Split: native, and on engines.

    python benchmarks/two_gpus.py --comfyui ~/ComfyUI --base /tmp/benchmark --out benchmarks/results/two_gpus.json

All ways run in one ComfyUI server, in turns of a few prompts, so that they share the machine's moods. The first prompt
of each turn is not counted: ComfyUI loads the model anew for it. Engines are live weights as CUDA graphs; nothing is
compiled. It needs two NVIDIA GPUs with 24 GB each, 6 GB of disk, three minutes and no network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "support")]

import models
import numpy
import prompts
from comfy_process import ComfyProcess, History
from scenarios import CONDITIONING, Prompt, node, relative_difference

STEPS, CFG, SIDE, TURNS, PROMPTS = 20, 7.0, 1024, 2, 4
WAYS = ("native_1", "native_2", "engines_1", "engines_2")
"""Native or on engines, and the number of GPUs."""
ENGINE = {"when_missing": "use native", "backend": "torch", "precision": "auto", "min_size": 64, "opt_size": SIDE,
          "max_size": SIDE, "max_images": 1, "max_tokens": 77}
SETTLING = 2
"""Prompts of each way before the clock starts: the first ones load weights, capture graphs and let clocks rise."""


def prompt(way: str, seed: int, side: int = SIDE, model: str = "full_sdxl") -> Prompt:
    """One prompt of one of the ``WAYS``; it keeps its latent under the way's name."""
    kind, gpus = way.split("_")
    built = {
        "unet": node("UNETLoader", unet_name=f"{model}.safetensors", weight_dtype="default"),
        "positive": node("TestConditioning", tokens=77, seed=1, **CONDITIONING["sdxl"]),
        "negative": node("TestConditioning", tokens=77, seed=2, **CONDITIONING["sdxl"]),
        "latent": node("EmptyLatentImage", width=side, height=side, batch_size=1),
        "save": node("TestSaveLatent", latent=["sampler", 0], name=way),
    }
    link = ["unet", 0]
    if kind == "engines":
        built["engine"] = node("TRTUNetEngine", model=link, **ENGINE)
        built["patch"] = node("TRTSamplerPatch", model=link, engine=["engine", 0])
        built["report"] = node("TRTReport", after=["sampler", 0], time_calls=False)
        link = ["patch", 0]
    if gpus == "2":
        built["split"] = node("MultiGPU_WorkUnits", model=link, max_gpus=2)
        link = ["split", 0]
    built["sampler"] = node(
        "KSampler", model=link, positive=["positive", 0], negative=["negative", 0], latent_image=["latent", 0],
        seed=seed, steps=STEPS, cfg=CFG, sampler_name="euler", scheduler="normal", denoise=1.0)
    return built


def run(comfy: ComfyProcess, way: str, seed: int, **options: Any) -> History:
    history = comfy.queue(prompt(way, seed, **options), timeout=300)
    if not history.ok:
        raise RuntimeError(f"{way}: {history.error}\n{history.traceback}")
    return history


def latent(history: History) -> numpy.ndarray:
    return numpy.load(history.output("save", "latent")[0])


def measure(comfy: ComfyProcess, **options: Any) -> dict[str, Any]:
    """Run all ways turn by turn; their seconds, errors to native on one GPU for one seed, and calls."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    row: dict[str, Any] = {"case": f"sdxl_{SIDE}_cfg_{STEPS}_steps"}
    settled = {way: [run(comfy, way, seed, **options) for seed in range(SETTLING)][-1] for way in WAYS}
    latents = {way: latent(history) for way, history in settled.items()}
    for turn in range(TURNS):
        for way in WAYS:
            _, *counted = [run(comfy, way, 100 + turn * PROMPTS + n, **options).seconds for n in range(PROMPTS)]
            seconds[way] += counted
    for way in WAYS:
        row[f"{way}_s"] = round(statistics.median(seconds[way]), 4)
        row[f"{way}_runs_s"] = seconds[way]
        row[f"{way}_rel_err"] = relative_difference(latents[way], latents[WAYS[0]])
        if way.startswith("engines"):
            rows = settled[way].output("report", "report")[0]["rows"]
            row[f"{way}_calls"] = [(one["backend"], one["engine"], one["native"], one["reasons"]) for one in rows]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's source, its requirements installed")
    parser.add_argument("--base", type=Path, required=True, help="where models and outputs go")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", default=["disable-dynamic-vram"], help="'default' is another one")
    options = parser.parse_args()
    options.comfyui, options.base = options.comfyui.resolve(), options.base.resolve()
    import torch

    models.make(options.comfyui, options.base, ["full_sdxl"])
    found: dict[str, Any] = {"command": " ".join(["python benchmarks/two_gpus.py", *sys.argv[1:]]), "rows": [],
                             "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
                             "torch": torch.__version__}  # fmt: skip
    for mode in options.modes:
        arguments = ["--cache-lru", "100"] + ([] if mode == "default" else [f"--{mode}"])
        log = options.out.with_name(f"{options.out.stem}_{mode}.log")
        with prompts.server(options.comfyui, options.base, log, *arguments) as comfy:
            found["rows"].append({"mode": mode} | measure(comfy))
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print({name: value for name, value in found["rows"][-1].items() if not isinstance(value, list)}, flush=True)


if __name__ == "__main__":
    main()
