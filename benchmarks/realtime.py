"""Frames a second of TRT Stream against stock nodes, a prompt a frame; and where the time of a short prompt goes.

    python benchmarks/realtime.py --comfyui ~/ComfyUI --base /tmp/benchmark --out benchmarks/results/realtime_h100.json

Each case is a row: ``fps``, ``p50_ms``, ``p95_ms`` and ``p99_ms`` of the stream, ``native_fps`` of stock nodes with the
same frames, 512 px, half precision, *Preview Image* behind them. ``rel_err`` is the largest relative difference of a
picture. ``prompt_1step_0cn`` is one prompt of one step with engines and without. ``parts`` tells the milliseconds of a
prompt of one step by what the server's threads were doing. Weights are random. ``--tiny`` tries all of it with tiny
models on a CPU, in some minutes: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import models
import numpy

sys.path.insert(0, str(models.ROOT / "tests" / "support"))

from comfy_process import ComfyProcess, History
from prompts import server
from scenarios import CONDITIONING, Prompt, node, relative_difference

ENGINE = {"when_missing": "build now", "min_size": 0, "opt_size": 0, "max_size": 0, "max_images": 0, "max_tokens": 0,
          "precision": "auto", "backend": "auto"}
TINY_ENGINE = ENGINE | {"min_size": 64, "opt_size": 64, "max_size": 256}
PROMPTS = 40
SELDOM = 3.0
"""Seconds between two questions to the server while it is timed: each takes its threads the time of a frame."""
DISTINCT = 20
"""Frames of a video that is then shown again and again."""
COMPARED = 3
"""The last frames of ``WARM``: by then the frames of a stream are one CUDA graph."""
WARM = 3 * DISTINCT


@dataclass(frozen=True)
class Case:
    """A way to make pictures of frames; without frames, of noise. ``at_once``: steps of neighbouring frames are.

    Where frames attend to ``remembered`` earlier ones, pictures are no longer those of stock nodes: none is compared.
    """

    name: str
    family: str
    vae: str
    controls: int
    steps: int
    sampler: str = "lcm"
    denoise: float = 0.6
    at_once: bool = False
    remembered: int = 0


CASES = {case.name: case for case in (
    Case("turbo_1step_1cn_taesd", "sd15", "taesd", 1, 1), Case("turbo_1step_1cn_kl", "sd15", "kl", 1, 1),
    Case("lcm_4step_2cn_taesd", "sd15", "taesd", 2, 4),
    Case("lcm_4step_2cn_taesd_batch", "sd15", "taesd", 2, 4, at_once=True),
    Case("turbo_1step_1cn_taesd_steady", "sd15", "taesd", 1, 1, remembered=1),
    Case("sdxl_turbo_2step_1cn_taesd", "sdxl", "taesd", 1, 2, "euler"),
)}  # fmt: skip
PROMPT = Case("prompt_1step_0cn", "sd15", "kl", 0, 1, denoise=1.0)
PARTS = Case("parts", "sd15", "kl", 1, 1, denoise=1.0)


@dataclass(frozen=True)
class Scale:
    """Full size or tiny: the files of models, the side of a picture, and how many frames and prompts."""

    tiny: bool
    frames: int
    prompts: int = PROMPTS
    build: bool = True

    @property
    def side(self) -> int:
        return 64 if self.tiny else 512

    @property
    def missing(self) -> dict[str, str]:
        """The choice of the engine node for a model without an engine, if it is another."""
        return {} if self.build else {"when_missing": "use native"}

    def loader(self, family: str) -> dict[str, Any]:
        if self.tiny or family != "sd15":
            name = f"tiny_{family}_unet" if self.tiny else f"full_{family}"
            return node("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default")
        return node("CheckpointLoaderSimple", ckpt_name="full_sd15.safetensors")

    def control(self, family: str, i: int) -> str:
        return f"{'tiny' if self.tiny else 'full'}_{family}_{'ab'[i]}"

    def vae(self, kind: str) -> str:
        return {"taesd": "tiny_sdxl_taesd", "kl": "tiny_kl"}[kind] if self.tiny else f"full_{kind}"

    def files(self, cases: list[Case]) -> list[str]:
        unets = {"sd15": "full_sd15", "sdxl": "full_sdxl"}
        nets = [self.control(case.family, i) for case in cases for i in range(case.controls)]
        return list(dict.fromkeys([name for c in cases for name in (unets[c.family], self.vae(c.vae))] + nets))


def common(case: Case, scale: Scale, engines: bool) -> Prompt:
    """Models, prompts and frames."""
    sampling = {"sampling": "lcm" if case.sampler == "lcm" else "eps", "zsnr": False}
    built = {
        "loader": scale.loader(case.family),
        "model": node("ModelSamplingDiscrete", model=["loader", 0], **sampling),
        "vae": node("VAELoader", vae_name=f"{scale.vae(case.vae)}.safetensors"),
        "positive": node("TestConditioning", tokens=77, seed=1, **CONDITIONING[case.family]),
        "negative": node("TestConditioning", tokens=77, seed=2, **CONDITIONING[case.family]),
        "video": node("TestImage", seed=5, width=scale.side, height=scale.side, batch=DISTINCT, channels=3),
    }
    nets = {f"control_net_{i + 1}": [f"net_{i}", 0] for i in range(case.controls)}
    for i in range(case.controls):
        built[f"net_{i}"] = node("ControlNetLoader", control_net_name=f"{scale.control(case.family, i)}.safetensors")
    if engines:
        room = {"max_images": case.steps} if case.at_once else {}
        built["accelerate"] = node("TRTAccelerate", model=["model", 0], vae=["vae", 0], **nets,
                                   **(TINY_ENGINE if scale.tiny else ENGINE) | scale.missing | room)
    return built


def parts_of(case: Case, engines: bool) -> tuple[list, list, list[list]]:
    """Return the links of the model, the VAE and the ControlNets."""
    if engines:
        return ["accelerate", 0], ["accelerate", 1], [["accelerate", 2 + i] for i in range(case.controls)]
    return ["model", 0], ["vae", 0], [[f"net_{i}", 0] for i in range(case.controls)]


def controlled(built: Prompt, nets: list[list], image: list) -> tuple[list, list]:
    """Apply ControlNets, all to one image; return the links of both conditionings."""
    positive, negative = ["positive", 0], ["negative", 0]
    for i, net in enumerate(nets):
        built[f"apply_{i}"] = node(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=net, image=image,
            strength=0.7 / (i + 1), start_percent=0.0, end_percent=1.0)
        positive, negative = [f"apply_{i}", 0], [f"apply_{i}", 1]
    return positive, negative


def prompt(case: Case, scale: Scale, number: int, engines: bool = False, save: bool = False, file: str = "") -> Prompt:
    """One prompt for one frame, by ComfyUI's own nodes but for TRT Accelerate.

    Args:
        file: the control image comes from this file of the input folder.
    """
    built = common(case, scale, engines)
    model, vae, nets = parts_of(case, engines)
    built["frame"] = node("ImageFromBatch", image=["video", 0], batch_index=number % DISTINCT, length=1)
    if file:
        built["hint"] = node("LoadImage", image=file)
    positive, negative = controlled(built, nets, ["hint" if file else "frame", 0])
    built["latent"] = node("VAEEncode", pixels=["frame", 0], vae=vae)
    if case.denoise == 1:
        built["latent"] = node("EmptyLatentImage", width=scale.side, height=scale.side, batch_size=1)
    seed = 7 if case.denoise < 1 else number
    built["sampler"] = node("KSampler", model=model, positive=positive, negative=negative, latent_image=["latent", 0],
                            seed=seed, **sampling_of(case))
    built["decode"] = node("VAEDecode", samples=["sampler", 0], vae=vae)
    if engines:
        built["report"] = node("TRTReport", after=["decode", 0], time_calls=False)
    shown = saved(["decode", 0], f"frame_{number}") if save else {"show": node("PreviewImage", images=["decode", 0])}
    return built | shown


def sampling_of(case: Case) -> dict[str, Any]:
    return {"steps": case.steps, "cfg": 1.0, "sampler_name": case.sampler, "scheduler": "sgm_uniform",
            "denoise": case.denoise}


def saved(pictures: list, name: str) -> Prompt:
    return {f"{name}_pixels": node("TestPixels", image=pictures),
            "save": node("TestSaveLatent", latent=[f"{name}_pixels", 0], name=name)}


def stream(case: Case, scale: Scale, frames: int, save: bool = False) -> Prompt:
    """One prompt for all frames."""
    built = common(case, scale, True)
    model, vae, nets = parts_of(case, True)
    built["frames"] = node("RepeatImageBatch", image=["video", 0], amount=max(1, frames // DISTINCT))
    positive, negative = controlled(built, nets, ["first", 0])
    built["first"] = node("ImageFromBatch", image=["video", 0], batch_index=0, length=1)
    built["stream"] = node(
        "TRTStream", model=model, vae=vae, positive=positive, negative=negative, frames=["frames", 0], seed=7,
        control_images="the frame", seed_each_frame="the same", similar_frames=0.0,
        steps_as_batch=case.at_once, remembered_frames=case.remembered, **sampling_of(case))
    built["report"] = node("TRTReport", after=["stream", 0], time_calls=False)
    if not save:
        return built
    built["last"] = node("ImageFromBatch", image=["stream", 0], batch_index=frames - COMPARED, length=COMPARED)
    return built | saved(["last", 0], "stream")


def done(history: History) -> History:
    if not history.ok:
        raise RuntimeError(f"{history.error}\n{history.traceback}")
    return history


def pictures(history: History) -> numpy.ndarray:
    return numpy.load(done(history).output("save", "latent")[0])


def queued(comfy: ComfyProcess, prompts: list[Prompt]) -> dict[str, float]:
    """Queue prompts all at once; return their rate and the times of each."""
    ids = [comfy.submit(one) for one in prompts]
    done(comfy.wait(ids[-1], 300, SELDOM))
    ended = [done(comfy.wait(one)) for one in ids]
    stamps = [[data["timestamp"] for _, data in one.messages if "timestamp" in data] for one in ended]
    whole = (stamps[-1][-1] - stamps[0][0]) / 1000
    ordered = sorted(one.seconds * 1000 for one in ended)
    return {"fps": round(len(ids) / whole, 2), "p50_ms": round(statistics.median(ordered), 1),
            "p95_ms": round(ordered[int(len(ordered) * 0.95)], 1)}


def native_of(comfy: ComfyProcess, case: Case, scale: Scale) -> dict[str, Any]:
    """Stock nodes with a prompt a frame: figures, and the first pictures."""
    compared = range(DISTINCT - COMPARED, DISTINCT)
    shown = [pictures(comfy.queue(prompt(case, scale, n, save=True), 300)) for n in compared]
    done(comfy.queue(prompt(case, scale, 0), 300))
    figures = queued(comfy, [prompt(case, scale, n) for n in range(1, scale.prompts + 1)])
    return {"pictures": numpy.concatenate(shown), **figures}


def streamed(comfy: ComfyProcess, case: Case, scale: Scale, native: dict[str, Any]) -> dict[str, Any]:
    """The row of a case."""
    started = time.perf_counter()
    shown = pictures(comfy.queue(stream(case, scale, WARM, save=True), 580))
    built_s = time.perf_counter() - started
    turn = time.monotonic_ns() % 2**31
    comfy.queue({"waits": node("TestHostWaits", action="begin", turn=turn)})
    done(comfy.queue(stream(case, scale, 4 * DISTINCT), 300))
    waits = comfy.queue({"waits": node("TestHostWaits", action="end", turn=turn)}).output("waits", "waits")
    history = done(comfy.wait(comfy.submit(stream(case, scale, scale.frames)), 580, SELDOM))
    report = history.output("report", "report")[0]
    (times,) = report["streams"]
    wanted = native.pop("pictures")
    return {
        "case": case.name, "fps": times["fps"], **{name: times[name] for name in ("p50_ms", "p95_ms", "p99_ms")},
        "native_fps": native["fps"], "native_p50_ms": native["p50_ms"], "native_p95_ms": native["p95_ms"],
        "frames": times["frames"], "node_s": round(history.seconds, 2), "first_run_s": round(built_s, 1),
        "rel_err": None if case.remembered else max(map(relative_difference, shown, wanted)),
        "one_by_one": times["one_by_one"], "steps_apart": times["steps_apart"], "host_waits_in_80_frames": waits,
        "served": [(row["name"], row["kind"], row["backend"], row["engine"], row["native"], row["reasons"])
                   for row in report["rows"]],
    }  # fmt: skip


def short_prompt(comfy: ComfyProcess, scale: Scale, engines: bool) -> dict[str, float]:
    """The times of one-step prompts with other seeds."""
    for n in range(3):
        done(comfy.queue(prompt(PROMPT, scale, n, engines), 580))
    return queued(comfy, [prompt(PROMPT, scale, 100 + n, engines) for n in range(scale.prompts)])


def parts(comfy: ComfyProcess, scale: Scale, engines: bool) -> dict[str, Any]:
    """The milliseconds of a one-step prompt with a ControlNet, by part."""
    files = [f"control_{name}.png" for name in "ab"]
    for n in range(4):
        done(comfy.queue(prompt(PARTS, scale, n, engines, file=files[n % 2]), 580))
    turn = time.monotonic_ns() % 2**31
    comfy.queue({"look": node("TestPromptParts", action="begin", turn=turn)})
    figures = queued(comfy, [prompt(PARTS, scale, 100 + n, engines, file=files[n % 2]) for n in range(scale.prompts)])
    (seen,) = comfy.queue({"look": node("TestPromptParts", action="end", turn=turn)}).output("look", "parts")
    each = {name: {part: round(ms / scale.prompts, 2) for part, ms in found.items()} for name, found in seen.items()}
    return {**figures, **each}


def run(options: argparse.Namespace, scale: Scale, keep: Callable[..., None]) -> None:
    """Measure all that was asked for: native first, because engines put weights into their own layout.

    Args:
        keep: takes a row as soon as it is there, or the parts of a prompt by ``native`` and ``engines``.
    """
    cases = [CASES[name] for name in options.cases if name in CASES]
    others = {name for name in options.cases if name not in CASES}
    arguments = ["--cpu"] if scale.tiny else []
    arguments += ["--disable-dynamic-vram"] if options.mode == "disable-dynamic-vram" else []
    with server(options.comfyui, options.base, options.out.with_suffix(".log"), *arguments) as comfy:
        native = {case.name: native_of(comfy, case, scale) for case in cases}
        plain = short_prompt(comfy, scale, False) if PROMPT.name in others else {}
        if PARTS.name in others:
            keep(native=parts(comfy, scale, False))
        for case in cases:
            keep(streamed(comfy, case, scale, native[case.name]))
        if plain:
            ours = short_prompt(comfy, scale, True)
            keep({"case": PROMPT.name, **ours, **{f"native_{name}": value for name, value in plain.items()},
                  "saved_ms": round(plain["p50_ms"] - ours["p50_ms"], 1)})
        if PARTS.name in others:
            keep(engines=parts(comfy, scale, True))


def meta(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor()
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "cpu_cores": os.cpu_count(),
            "mode": options.mode, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join(["python benchmarks/realtime.py", *sys.argv[1:]])}


def main() -> None:
    every = [*CASES, PROMPT.name, PARTS.name]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=every, default=every)
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--mode", choices=("default", "disable-dynamic-vram"), default="disable-dynamic-vram")
    parser.add_argument("--no-build", action="store_true", help="build nothing: live weights as graphs, the VAE native")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to try the script")
    options = parser.parse_args()
    for name in ("comfyui", "base", "out"):
        setattr(options, name, getattr(options, name).resolve())
    scale = Scale(options.tiny, options.frames, 20 if options.tiny else options.prompts, not options.no_build)
    if not scale.tiny:
        named = [CASES.get(name, PARTS) for name in options.cases]
        models.make(options.comfyui, options.base, scale.files(named))
    else:
        models.tiny_models.make_images(options.base / "input")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {"rows": [], "parts": {}}
    if options.out.exists():
        known |= json.loads(options.out.read_text())
    rows = {row["case"]: row for row in known["rows"]}

    def keep(row: dict[str, Any] | None = None, **looked: Any) -> None:
        """Write a result at once: the machine may be taken away."""
        print(json.dumps(row or looked), flush=True)
        if row:
            rows[row["case"]] = row
        known["parts"] |= looked
        result = {"meta": meta(options), "rows": list(rows.values()), "parts": known["parts"]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    run(options, scale, keep)


if __name__ == "__main__":
    main()
