"""The first minutes with a large model, as an artist meets them: whole prompts in a real ComfyUI server.

    python benchmarks/first_minutes.py --comfyui ~/ComfyUI --base /tmp/benchmark --out first_minutes.json

Each way (*stock* nodes, core's *TorchCompileModel*, *TRT Accelerate* as it is placed, and with *build first*) has a
server of its own, and one more that finds its engines. The first prompt comes, then others, another size, another
length of the prompt, a LoRA, its strength. Weights are random; ``--tiny`` tries all of it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools"), str(HERE.parent / "tests" / "support")]

import prompts

sys.path.insert(0, str(HERE))  # before the tests' modules, where one of ours has such a name
import large_cases
import tiny_models
import torch
from comfy_process import ComfyProcess, History
from large_weights import drawn
from prompts import node, relative_difference
from safetensors.torch import save_file

WAYS = ("stock", "compile", "default", "build first")
LAYERS = ("qkv", "qkv_proj", "linear1", "to_q", "self_attn.q")
"""Parts of the names of layers that a LoRA changes."""
RUNS = 3
STEPS = {"zimage": 8, "flux": 20, "qwen_image": 8, "krea2": 8, "wan": 4, "minimax_h3": 4, "unet": 20}
OTHER = {512: (448, 640), 1024: (832, 1216), 1328: (1104, 1472), 832: (480, 832)}
"""Width of a case's picture -> another size."""
BUILD_SECONDS = 300


class Bench:
    """A case's files, and its prompts in one way."""

    def __init__(self, name: str, options: argparse.Namespace, made: bool = False):
        """Take a case of large_models.py; its files are written unless another process has made them."""
        case = large_cases.CASES[name]
        self.name, self.options, self.base = name, options, options.base
        self.case = replace(case, side=128, height=0, width=case.tiny_width) if options.tiny else case
        self.size = (self.case.side, self.case.height or self.case.side)
        self.other = (96, 160) if options.tiny else OTHER[case.side]
        self.stock: dict[str, Any] = {}
        if not made:
            self._make_files()

    def _make_files(self) -> None:
        for folder in ("diffusion_models", "loras"):
            (self.base / "models" / folder).mkdir(parents=True, exist_ok=True)
        config = self.case.tiny if self.options.tiny else self.case.config
        weights = drawn(self.case.network, config, self.case.eight_bit, "cpu" if self.options.tiny else "cuda")
        lora = {}
        for key, weight in weights.items():
            if weight.ndim == 2 and any(f"{part}.weight" in key for part in LAYERS):
                start = f"diffusion_model.{key.removesuffix('.weight')}"
                lora[f"{start}.lora_A.weight"] = 0.05 * torch.randn(16, weight.shape[1], dtype=torch.bfloat16)
                lora[f"{start}.lora_B.weight"] = 0.05 * torch.randn(weight.shape[0], 16, dtype=torch.bfloat16)
        weights = {key: weight.clone() if key.endswith("comfy_quant") else weight for key, weight in weights.items()}
        save_file(weights, self.base / "models" / "diffusion_models" / f"{self.name}.safetensors")
        if self._decodes:
            import vae

            (self.base / "models" / "vae").mkdir(exist_ok=True)
            save_file(vae.drawn(self._decodes), self.base / "models" / "vae" / f"{self._decodes}.safetensors")
        save_file(lora, self.base / "models" / "loras" / f"{self.name}.safetensors")

    @property
    def _decodes(self) -> str:
        """The VAE that prompts end with, one of ``vae.py``; mostly none."""
        return getattr(self.options, "decode", None) or ""

    def remove(self) -> None:
        """Delete the case's files: a lent disk is small."""
        for folder in ("diffusion_models", "loras"):
            (self.base / "models" / folder / f"{self.name}.safetensors").unlink(missing_ok=True)

    def prompt(self, comfy: ComfyProcess, way: str, seed: int, size: tuple[int, int], tokens: int, lora: float) -> dict:
        """A prompt; ``lora`` is its strength, 0 for none."""
        case, model = self.case, ["model", 0]
        made = {
            "model": node("UNETLoader", unet_name=f"{self.name}.safetensors", weight_dtype="default"),
            "prompt": node("TestConditioning", tokens=tokens, width=case.width, pooled=self._pooled, seed=1),
        }
        condition = ["prompt", 0]
        if lora:
            made["lora"] = node("LoraLoaderModelOnly", model=model, lora_name=f"{self.name}.safetensors",
                                strength_model=lora)  # fmt: skip
            model = ["lora", 0]
        if way == "compile":
            made["compile"] = node("TorchCompileModel", model=model, backend="inductor")
            model = ["compile", 0]
        elif way != "stock":
            given = {} if way == "default" else {"when_missing": "build now"}
            given |= {"backend": "torch"} if self.options.tiny and not getattr(self.options, "my_card", 0) else {}
            made["accelerate"] = node("TRTAccelerate", model=model, **{**self._placed(comfy), **given})
            made["report"] = node("TRTReport", after=["sampler", 0])
            model = ["accelerate", 0]
        if case.network == "flux":
            made["guidance"] = node("FluxGuidance", conditioning=condition, guidance=3.5)
            condition = ["guidance", 0]
        empty, more = ("EmptyHunyuanLatentVideo", {"batch_size": 1, "length": case.length}) if case.length > 1 else (
            "EmptySD3LatentImage", {"batch_size": 1})
        if case.network == "minimax_h3":  # a video with its sound
            empty, more = "EmptyMiniMaxH3LatentAV", {"length": case.length}
        made["latent"] = node(empty, width=size[0], height=size[1], **more)
        if case.references:  # one, empty, as large as the picture
            made["picture"] = node("EmptyHunyuanLatentVideo", width=size[0], height=size[1], length=1, batch_size=1)
            made["reference"] = node("ReferenceLatent", conditioning=condition, latent=["picture", 0])
            condition = ["reference", 0]
        made["sampler"] = node(
            "KSampler", model=model, positive=condition, negative=condition, latent_image=["latent", 0], seed=seed,
            steps=STEPS[case.network], cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0)  # fmt: skip
        made["save"] = node("TestSaveLatent", latent=["sampler", 0], name="latent")
        if self._decodes:
            made["vae"] = node("VAELoader", vae_name=f"{self._decodes}.safetensors")
            accelerated = "accelerate" in made
            if accelerated:
                made["accelerate"]["inputs"]["vae"] = ["vae", 0]
                made["report"]["inputs"]["after"] = ["decode", 0]
            decoder = ["accelerate", 1] if accelerated else ["vae", 0]
            made["decode"] = node("VAEDecode", samples=["sampler", 0], vae=decoder)
            made["end"] = node("PreviewAny", source=["decode", 0])
        return made

    @property
    def _pooled(self) -> int:
        own = self.case.tiny.get("vec_in_dim") if self.options.tiny and self.case.pooled else None
        return own or self.case.pooled

    def _placed(self, comfy: ComfyProcess) -> dict[str, Any]:
        """The settings of a node that was just placed."""
        asked = comfy.object_info("TRTAccelerate")["input"]["required"]
        return {name: spec[1]["default"] for name, spec in asked.items() if "default" in (spec[1:] or [{}])[0]}

    def run(self, way: str) -> dict[str, Any]:
        """All prompts of one way: seconds of each, and how far its latent is from stock's."""
        import numpy

        row: dict[str, Any] = {"case": self.name, "way": way}
        length = self.case.tokens
        plan = [("first", 1, self.size, length, 0.0, 1), ("warm", 10, self.size, length, 0.0, RUNS),
                ("size_first", 20, self.other, length, 0.0, 1), ("size_warm", 21, self.other, length, 0.0, RUNS),
                ("prompt_first", 30, self.size, length // 2, 0.0, 1),
                ("prompt_warm", 31, self.size, length // 2, 0.0, RUNS),
                ("lora_first", 40, self.size, length, 0.5, 1), ("lora_strength", 41, self.size, length, 0.8, 1),
                ("lora_warm", 42, self.size, length, 0.8, RUNS)]  # fmt: skip
        for process, asked in (("", plan), ("again_", plan[:1])):
            with self._server(f"{process}{way}") as comfy:
                for label, seed, size, tokens, lora, count in asked:
                    ended = [self._queue(comfy, way, seed + i, size, tokens, lora) for i in range(count)]
                    row[process + label] = round(statistics.median(one.seconds for one in ended), 2)
                    value = numpy.load(ended[-1].output("save", "latent")[0])
                    if way == "stock":
                        self.stock[label] = value
                    elif label in self.stock:
                        row[f"{process}{label}_rel_err"] = round(relative_difference(value, self.stock[label]), 5)
                    if way in WAYS[2:]:
                        row[f"{process}{label}_ran"] = [
                            (one["backend"], one["engine"], one["native"])
                            for one in ended[-1].output("report", "report")[0]["rows"]]  # fmt: skip
                    if way == "default" and label == "first" and not process:
                        row["ready_s"] = self._until_ready(comfy)
        return row

    def _server(self, log: str) -> ComfyProcess:
        page = prompts.prepared(self.base)
        flags = [part for flag in getattr(self.options, "flags", ()) for part in f"--{flag}".split()]
        return ComfyProcess(self.options.comfyui, self.base, arguments=["--front-end-root", str(page), *flags],
                            log=self.options.logs / f"{self.name}_{log.replace(' ', '_')}.log",
                            cpu=self.options.tiny)  # fmt: skip

    def _queue(self, comfy: ComfyProcess, way: str, seed: int, size: tuple[int, int], tokens: int, lora: float
               ) -> History:  # fmt: skip
        ended = comfy.queue(self.prompt(comfy, way, seed, size, tokens, lora), timeout=600)
        assert ended.ok, ended.error
        return ended

    def _until_ready(self, comfy: ComfyProcess) -> float:
        """Seconds until nothing is being built any more."""
        began = time.monotonic()
        while time.monotonic() - began < BUILD_SECONDS:
            if all(job["state"] not in ("queued", "running") for job in comfy.get("/hybrid_trt/builds")):
                break
            time.sleep(0.2)
        return round(time.monotonic() - began, 1)


def prepare(options: argparse.Namespace) -> list[str]:
    """Make paths absolute and ComfyUI importable; return the command's arguments, which ComfyUI would read."""
    options.comfyui, options.base, options.logs = (p.resolve() for p in (options.comfyui, options.base, options.out))
    options.logs = options.logs.parent
    arguments, sys.argv = sys.argv[1:], sys.argv[:1]
    let_comfyui_be_imported(options)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(options.base / "python_cache"))  # as an installation has it
    return arguments


def let_comfyui_be_imported(options: argparse.Namespace) -> None:
    """Put ComfyUI on this process's path, for tiny models on a CPU."""
    sys.path.append(str(options.comfyui))
    if options.tiny:
        tiny_models.import_comfy_on_cpu()


def about(script: str, arguments: list[str]) -> dict[str, Any]:
    """Return what a result file says of the machine and the command."""
    return {"gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "a CPU", "torch": torch.__version__,
            "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
             "date": datetime.now(timezone.utc).date().isoformat(),
            "command": " ".join(["python", f"benchmarks/{script}", *arguments])}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="where models and outputs go")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["zimage_1024", "flux1_1024_fp8"], help="of large_models.py")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--decode", help="the VAE that prompts end with, of vae.py: wan21")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    meta = about("first_minutes.py", prepare(options))
    rows = []
    for name in options.cases:
        bench = Bench(name, options)
        for way in options.ways:
            shutil.rmtree(options.base / "models" / "trt_engines", ignore_errors=True)
            rows.append(bench.run(way))
            print({key: value for key, value in rows[-1].items() if not key.endswith("_ran")}, flush=True)
            options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        bench.remove()


if __name__ == "__main__":
    main()
