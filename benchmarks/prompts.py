"""Whole prompts in a real ComfyUI server: native and through engines, in both of ComfyUI's ways to load weights."""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import numpy

sys.path.insert(0, str(models.ROOT / "tests" / "support"))

from comfy_process import ComfyProcess, History
from scenarios import Prompt, node, relative_difference
from timing import PeakMemory

ENGINE = {"min_size": 64, "opt_size": 512, "max_size": 1024, "max_images": 4, "max_tokens": 616, "precision": "auto"}
ONE_SIZE = {"min_size": 512, "opt_size": 512, "max_size": 512, "max_images": 1, "max_tokens": 77, "precision": "auto"}
"""Engines that are built for minutes are built for what is measured."""
VAE_SETTINGS = ("min_size", "opt_size", "max_size", "precision")
STEPS = 20


def sd15_prompt(
    controls: int, seed: int, engine: str | None, latent: str | None = None, image: bool = True, steps: int = STEPS,
    backend: str = "torch", vae_engine: bool = False,
) -> Prompt:
    """SD1.5 at 512x512, euler, cfg 7.5.

    Args:
        engine: None for stock nodes alone, else the engine nodes' ``when_missing``, with this ``backend``.
        latent: keep the latent under this name.
        image: decode and save a picture.
        vae_engine: decode on an engine, too.
    """
    settings = {**(ENGINE if backend == "torch" else ONE_SIZE), "backend": backend}
    built: Prompt = {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name="full_sd15.safetensors"),
        "positive": node("CLIPTextEncode", clip=["checkpoint", 1], text="a lighthouse in a storm"),
        "negative": node("CLIPTextEncode", clip=["checkpoint", 1], text="blurry"),
        "latent": node("EmptyLatentImage", width=512, height=512, batch_size=1),
    }
    if image:
        vae = ["checkpoint", 2]
        if vae_engine:
            built["vae"] = node("TRTVAEEngine", vae=vae, when_missing=engine, backend=backend,
                                **{name: value for name, value in settings.items() if name in VAE_SETTINGS})
            vae = ["vae", 0]
        built["decode"] = node("VAEDecode", samples=["sampler", 0], vae=vae)
        built["image"] = node("SaveImage", images=["decode", 0], filename_prefix="benchmark")
    model, positive, negative = ["checkpoint", 0], ["positive", 0], ["negative", 0]
    if engine is not None:
        built["engine"] = node("TRTUNetEngine", model=model, when_missing=engine, **settings)
        built["patch"] = node("TRTSamplerPatch", model=model, engine=["engine", 0])
        built["report"] = node("TRTReport", after=["sampler", 0])
        model = ["patch", 0]
    for i in range(controls):
        built[f"net_{i}"] = node("ControlNetLoader", control_net_name=f"full_sd15_{'abcd'[i]}.safetensors")
        built[f"hint_{i}"] = node("LoadImage", image=f"control_{'abab'[i]}.png")
        net = [f"net_{i}", 0]
        if engine is not None:
            built[f"engine_{i}"] = node("TRTControlNetEngine", control_net=net, when_missing=engine, **settings)
            net = [f"engine_{i}", 0]
        built[f"apply_{i}"] = node(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net, image=[f"hint_{i}", 0],
            strength=0.7 / (i + 1), start_percent=0.0, end_percent=1.0)
        positive, negative = [f"apply_{i}", 0], [f"apply_{i}", 1]
    built["sampler"] = node("KSampler", model=model, positive=positive, negative=negative, latent_image=["latent", 0],
                            seed=seed, steps=steps, cfg=7.5, sampler_name="euler", scheduler="normal", denoise=1.0)
    if latent:
        built["save"] = node("TestSaveLatent", latent=["sampler", 0], name=latent)
    return built


@dataclass
class Run:
    """One way to run one prompt several times, with other seeds: whole, without decoding and saving a picture, and so
    with half of the steps."""

    seconds: list[float] = field(default_factory=list)
    sampling_seconds: list[float] = field(default_factory=list)
    half_seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    first_s: float = 0.0
    latent: numpy.ndarray | None = None
    report: dict[str, Any] | None = None

    @property
    def median_ms(self) -> float:
        return round(statistics.median(self.seconds) * 1000, 1)

    @property
    def sampling_ms(self) -> float:
        return round(statistics.median(self.sampling_seconds) * 1000, 1)

    @property
    def step_ms(self) -> float:
        """Milliseconds of one more step: what a prompt takes besides its steps is not in it."""
        more = statistics.median(self.sampling_seconds) - statistics.median(self.half_seconds)
        return round(more * 1000 / (STEPS - STEPS // 2), 2)

    def to_json(self) -> dict[str, Any]:
        return {"median_s": round(statistics.median(self.seconds), 4), "runs_s": self.seconds,
                "sampling_runs_s": self.sampling_seconds, "half_runs_s": self.half_seconds, "step_ms": self.step_ms,
                "first_s": self.first_s, "peak_mb": self.peak_mb}


def measure(
    comfy: ComfyProcess, memory: PeakMemory, controls: int, engine: str | None, name: str, runs: int = 6,
    backend: str = "torch",
) -> Run:
    """Run a prompt once with its latent kept, once to settle, then ``runs`` times for the clock."""
    run = Run()
    with memory:
        first = comfy.queue(sd15_prompt(controls, 1, engine, name, backend=backend), timeout=500)
        path, _ = first.output("save", "latent")
        run.first_s = first.seconds
        run.latent = numpy.load(path)
        comfy.queue(sd15_prompt(controls, 2, engine, backend=backend))
        for i in range(runs):
            history: History = comfy.queue(sd15_prompt(controls, 10 + i, engine, backend=backend))
            assert history.ok, history.error
            run.seconds.append(history.seconds)
        for i in range(runs):
            history = comfy.queue(sd15_prompt(controls, 30 + i, engine, name, image=False, backend=backend))
            run.sampling_seconds.append(history.seconds)
            half = sd15_prompt(controls, 50 + i, engine, name, image=False, steps=STEPS // 2, backend=backend)
            run.half_seconds.append(comfy.queue(half).seconds)
    run.peak_mb = memory.peak
    if engine is not None:
        run.report = history.output("report", "report")[0]
    return run


def rel_err(value: Run, reference: Run) -> float:
    """Difference of the final latents for the same seed."""
    if not numpy.isfinite(value.latent).all():
        return float("inf")
    return relative_difference(value.latent, reference.latent)


def server(comfyui: Path, base: Path, log: Path, *arguments: str, **environment: str) -> ComfyProcess:
    """A server on the GPU with the pack and the test nodes; it needs no web front end."""
    return ComfyProcess(comfyui, base, arguments=["--front-end-root", str(prepared(base)), *arguments], log=log,
                        cpu=False, environment=environment)


def prepared(base: Path) -> Path:
    """Put the pack and the test nodes into a base directory; return the folder of a page that shows nothing."""
    page = base / "page"
    page.mkdir(parents=True, exist_ok=True)
    (page / "index.html").write_text("<html></html>")
    nodes = base / "custom_nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    for name, target in (("hybrid-trt", models.ROOT), ("comfy_test_nodes", models.ROOT / "tests" / "comfy_test_nodes")):
        if not os.path.lexists(nodes / name):
            link(nodes / name, target)
    return page


def link(place: Path, target: Path) -> None:
    """Let a folder be found at another place. Windows lets everybody make junctions, but not symbolic links."""
    if os.name == "nt":
        import _winapi

        _winapi.CreateJunction(str(target), str(place))
    else:
        place.symlink_to(target, target_is_directory=True)


def run(comfyui: Path, base: Path, out: Path, control_counts: list[int], modes: list[str]) -> list[dict[str, Any]]:
    """All prompts in all modes; returns rows and prints them as they come."""
    rows = []
    for mode in modes:
        arguments = [] if mode == "default" else [f"--{mode}"]
        memory = PeakMemory()
        with server(comfyui, base, out / f"server_{mode}.log", *arguments) as comfy:
            native = {n: measure(comfy, memory, n, None, f"native_{n}") for n in control_counts}
        engines: dict[str, dict[int, Run]] = {}
        for level, when in (("graph", "use native"), ("engine", "build now"), ("warm", "use native")):
            if level == "graph" and any((base / "models" / "trt_engines").glob("sd15*torch*")):
                continue  # engines that are there would be used
            time.sleep(1)
            with server(comfyui, base, out / f"server_{mode}_{level}.log", *arguments) as comfy:
                counts = control_counts if level != "warm" else control_counts[-1:]
                engines[level] = {n: measure(comfy, memory, n, when, f"{level}_{n}") for n in reversed(counts)}
        for n in control_counts:
            row = {"case": f"sd15_ksampler_{n}cn", "mode": mode, "native_ms": native[n].median_ms,
                   "native_sampling_ms": native[n].sampling_ms, "native_step_ms": native[n].step_ms,
                   "native": native[n].to_json()}
            for level, found in engines.items():
                if n in found:
                    row[f"{level}_ms"] = found[n].median_ms
                    row[f"{level}_sampling_ms"] = found[n].sampling_ms
                    row[f"{level}_step_ms"] = found[n].step_ms
                    row[level] = found[n].to_json()
                    row[f"{level}_rel_err"] = rel_err(found[n], native[n])
                    row[f"{level}_report"] = {k: [(r["name"], r["backend"], r["engine"], r["native"], r["reasons"])
                                                  for r in v] for k, v in found[n].report.items() if k == "rows"}
            if "engine_ms" in row:
                row["rel_err"] = row["engine_rel_err"]
            if "warm" in row:
                row["vram_ratio"] = round(engines["warm"][n].peak_mb / native[n].peak_mb, 3)
            rows.append(row)
            print({k: v for k, v in row.items() if not isinstance(v, dict)}, flush=True)
    return rows


def run_files(comfyui: Path, base: Path, out: Path, backend: str, controls: int) -> list[dict[str, Any]]:
    """A whole prompt through the engines of a backend that builds files, all of its networks on them."""
    memory = PeakMemory()
    with server(comfyui, base, out / f"server_{backend}.log") as comfy:
        native = measure(comfy, memory, controls, None, "native")
        found = measure(comfy, memory, controls, "build now", backend, backend=backend)
    served = [(row["name"], row["backend"], row["engine"], row["native"]) for row in found.report["rows"]]
    row = {
        "case": f"sd15_ksampler_{controls}cn", "mode": "default", "native_ms": native.median_ms,
        f"{backend}_native_ms": native.median_ms, f"{backend}_graph_ms": found.median_ms,
        f"{backend}_sampling_ms": found.sampling_ms, f"{backend}_rel_err": rel_err(found, native),
        f"{backend}_served": served, backend: found.to_json(),
    }  # fmt: skip
    print({k: v for k, v in row.items() if not isinstance(v, dict)}, flush=True)
    return [row]


def run_vae(comfyui: Path, base: Path, out: Path, controls: int, runs: int = 15) -> list[dict[str, Any]]:
    """A whole prompt on engines, whose picture native and an engine decode turn by turn."""
    found: dict[bool, list[float]] = {False: [], True: []}
    with server(comfyui, base, out / "server_vae.log", "--disable-dynamic-vram") as comfy:
        for turn in range(runs + 2):
            for vae_engine in (False, True):
                prompt = sd15_prompt(controls, 100 + 2 * turn + vae_engine, "build now", vae_engine=vae_engine)
                history = comfy.queue(prompt, timeout=500)
                assert history.ok, history.error
                if turn > 1:  # the first of each builds and opens engines, the second captures
                    found[vae_engine].append(history.seconds)
    before, after = (round(statistics.median(found[one]) * 1000, 1) for one in (False, True))
    served = [(row["name"], row["backend"], row["engine"], row["native"])
              for row in history.output("report", "report")[0]["rows"]]  # fmt: skip
    row = {"case": f"sd15_ksampler_{controls}cn_vae", "mode": "disable-dynamic-vram", "native_vae_ms": before,
           "engine_vae_ms": after, "saved_ms": round(before - after, 1), "native_vae_runs_s": found[False],
           "engine_vae_runs_s": found[True], "served": served}  # fmt: skip
    print({k: v for k, v in row.items() if k != "served"}, flush=True)
    return [row]
