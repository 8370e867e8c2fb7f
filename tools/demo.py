"""A shipped workflow twice in a real ComfyUI: native, and with its model, ControlNets and VAE on engines.

The usual workflow has small models that were trained on emoji: its picture shows one, by its name and its edges. In
others tiny random models stand in for real ones, so their pictures are abstract; what counts is that they are the same.
The workflow is the one in workflows/, loaded as a user would load it: only model names, prompt, size and steps are
changed. No text encoder of a transformer is tiny, so random prompts stand in for those too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from comfy_process import ComfyProcess, History
from demo_models import EMOJI, edges_of, put, with_trained_models
from PIL import Image, ImageChops, ImageDraw, ImageFont
from safetensors.numpy import load_file
from tiny_prompts import without_text_encoders
from workflow_recipes import RECIPES, TINY, with_tiny_models
from workflow_to_prompt import Prompt, bypass, set_widget, to_prompt

ROOT = Path(__file__).resolve().parent.parent
TITLES = {recipe.name: recipe.title for recipe in RECIPES}
USUAL = "sd15_two_controlnets"
WORKFLOWS = (USUAL, "flux1_text_to_image", "flux1_controlnet", "zimage_text_to_image", "krea2_text_to_image",
             "qwen_text_to_image", "qwen_edit")
"""Shipped workflows of one *KSampler* that save a picture."""
TOOLS, TEST_NODES = ROOT / "tools", ROOT / "tests" / "comfy_test_nodes"
MAX_ERROR = 1e-5
ENGINE_NODES = ("TRTAccelerate", "TRTReport", "PreviewImage")
"""Our nodes that have a part in the engine run only, and the stock node that shows the report's picture."""
SIZE, STEPS = 128, 8
BRIGHTER = 100
"""Times as bright as it is, at which a difference is shown."""
WARM_UP_SEED, SEED = 1, 2


def say(text: str) -> None:
    """One progress line on stderr."""
    print(f"[demo] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def saying(text: str) -> Iterator[None]:
    """Say what is being done, and every few seconds that it still is."""
    done = threading.Event()
    started = time.monotonic()

    def tick() -> None:
        while not done.wait(10):
            say(f"{text} ... {time.monotonic() - started:.0f} s")

    say(text)
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def demo_prompt(name: str, object_info: dict[str, Any], engines: bool, seed: int) -> Prompt:
    """A shipped workflow as an API prompt for small models, with the latent saved too.

    Args:
        engines: as shipped; otherwise with all engine nodes bypassed, so that nothing of ours computes.
    """
    shipped = json.loads((ROOT / "workflows" / f"{TITLES[name]}.json").read_text(encoding="utf-8"))
    workflow = (with_trained_models if name == USUAL else with_tiny_models)(shipped, object_info)
    changes: dict[tuple[str, str], Any] = {
        ("KSampler", "seed"): seed,
        ("TRTAccelerate", "when_missing"): "build now",
        ("TRTAccelerate", "min_size"): SIZE // 2,  # a picture smaller than what fits the family
        ("TRTAccelerate", "opt_size"): SIZE,
        ("TRTAccelerate", "max_size"): SIZE * 2,
    }
    for (node, widget), value in changes.items():
        set_widget(workflow, node, widget, value, object_info)
    if name != USUAL:
        set_widget(workflow, "KSampler", "steps", STEPS, object_info)
    if not engines:
        bypass(workflow, ENGINE_NODES)
    prompt = to_prompt(workflow, object_info)
    if name != USUAL:
        prompt = without_text_encoders(prompt)
    sampler = next(i for i, n in prompt.items() if n["class_type"] == "KSampler")
    prompt["latent"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": [sampler, 0], "filename_prefix": f"demo/{'engine' if engines else 'native'}"},
    }
    return prompt


def outputs_of(history: History, prompt: Prompt, class_type: str) -> dict[str, Any]:
    """Return what the prompt's only node of a class gave."""
    if not history.ok:
        raise SystemExit(f"[demo] node {history.error_type} failed: {history.error}")
    return history.outputs[next(i for i, n in prompt.items() if n["class_type"] == class_type)]


def saved_file(comfy: ComfyProcess, entry: dict[str, str]) -> Path:
    """Return the place of an output file of ComfyUI's."""
    return comfy.base / "output" / entry["subfolder"] / entry["filename"]


def latent(comfy: ComfyProcess, history: History, prompt: Prompt) -> numpy.ndarray:
    """The latent that a run saved."""
    return load_file(saved_file(comfy, outputs_of(history, prompt, "SaveLatent")["latents"][0]))["latent_tensor"]


def keep_image(comfy: ComfyProcess, history: History, prompt: Prompt, target: Path) -> Path:
    """Copy a run's picture."""
    shutil.copyfile(saved_file(comfy, outputs_of(history, prompt, "SaveImage")["images"][0]), target)
    return target


def side_by_side(pictures: dict[str, Image.Image], target: Path) -> Path:
    """Write pictures in a row, twice as large, each with its title above."""
    (width, height), above = (2 * side for side in next(iter(pictures.values())).size), 28
    row = Image.new("RGB", (width * len(pictures), above + height), "white")
    draw, font = ImageDraw.Draw(row), ImageFont.load_default(16)
    for x, (title, picture) in zip(range(0, row.width, width), pictures.items(), strict=True):
        draw.text((x + width / 2, above / 2), title, "black", font, anchor="mm")
        row.paste(picture.resize((width, height), Image.Resampling.LANCZOS), (x, above))
    row.save(target, optimize=True)
    return target


def shown(name: str, base: Path, native: Path, engine: Path) -> dict[str, Image.Image]:
    """Return what the demo shows, by title."""
    edges = {"edges": base / "input" / edges_of(EMOJI[0])} if name == USUAL else {}
    files = edges | {"normal model": native, "engines": engine}
    pictures = {title: Image.open(file).convert("RGB") for title, file in files.items()}
    apart = ImageChops.difference(pictures["normal model"], pictures["engines"])
    return pictures | {f"difference, {BRIGHTER} times": apart.point(lambda value: min(255, BRIGHTER * value))}


def make_models(name: str, comfyui: Path, base: Path) -> None:
    """Small models and control images where ComfyUI finds them."""
    if name == USUAL:
        return put(comfyui, base)
    folders = ["--comfyui", str(comfyui), "--models", str(base / "models"), "--input", str(base / "input")]
    command = [sys.executable, str(TOOLS / "tiny_models.py"), *folders, *sorted(set(TINY.values()))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def with_test_nodes(name: str, base: Path) -> Iterator[None]:
    """Have ComfyUI load the nodes that stand in for text encoders, where a workflow needs them."""
    link = base / "custom_nodes" / TEST_NODES.name
    needed = name != USUAL and not link.exists()
    if needed:
        link.unlink(missing_ok=True)
        link.symlink_to(TEST_NODES, target_is_directory=True)
    try:
        yield
    finally:
        if needed:
            link.unlink()


def build_seconds(base: Path) -> float:
    """Return the seconds of exporting, checking and building by the manifests."""
    manifests = (base / "models" / "trt_engines").glob("*/manifest.json")
    return sum(sum(json.loads(path.read_text(encoding="utf-8"))["seconds"].values()) for path in manifests)


def asked(prompt: Prompt) -> int:
    """Count the networks that a workflow asks engines for; one that two loaders load is one."""
    (node,) = (n for n in prompt.values() if n["class_type"] == "TRTAccelerate")
    links = [link for name, link in node["inputs"].items() if name.startswith(("model", "vae", "control_net"))]
    return len({(json.dumps(prompt[loader]), output) for loader, output in links})


def run(name: str, comfy: ComfyProcess, out: Path) -> dict[str, Any]:
    """Sample natively and through engines; returns the report. Both pictures go to ``out``."""
    info = comfy.object_info()
    say(f"sampling '{TITLES[name]}' natively, twice")
    comfy.queue(demo_prompt(name, info, engines=False, seed=WARM_UP_SEED))
    native_prompt = demo_prompt(name, info, engines=False, seed=SEED)
    native = comfy.queue(native_prompt)
    expected = latent(comfy, native, native_prompt)

    engine_prompt = demo_prompt(name, info, engines=True, seed=SEED)
    with saying(f"building {asked(engine_prompt)} engines, then sampling on them"):
        comfy.queue(demo_prompt(name, info, engines=True, seed=WARM_UP_SEED), timeout=900)
    say("sampling on the engines again, now that they are there")
    engine = comfy.queue(engine_prompt)
    found = latent(comfy, engine, engine_prompt)
    counts = outputs_of(engine, engine_prompt, "TRTReport")["report"][0]

    native_image = keep_image(comfy, native, native_prompt, out / "native.png")
    engine_image = keep_image(comfy, engine, engine_prompt, out / "engine.png")
    images = [native_image, engine_image,
              side_by_side(shown(name, comfy.base, native_image, engine_image), out / "side_by_side.png")]
    error = numpy.linalg.norm(found.astype(float) - expected) / numpy.linalg.norm(expected.astype(float))
    kept = ("name", "engine", "native", "reasons")
    return {
        "workflow": TITLES[name],
        "latent_rel_err": float(error) if numpy.isfinite(found).all() else float("inf"),
        "images": [str(image) for image in images],
        "asked": asked(engine_prompt),
        "networks": [{key: row[key] for key in kept} for row in counts["rows"]],
        "seconds": {
            "build": round(build_seconds(comfy.base), 2),
            "native": round(native.seconds, 2),
            "engine": round(engine.seconds, 2),
        },
    }


def failures(report: dict[str, Any]) -> list[str]:
    """List what the demo promises and this run did not keep, a sentence each.

    A VAE that decodes videos has engines with torch alone, which ``auto`` takes on a GPU.
    """
    wrong, rows = [], report["networks"]
    if not report["latent_rel_err"] <= MAX_ERROR:
        wrong.append(f"the latents differ by {report['latent_rel_err']:.1e}, more than {MAX_ERROR:.0e}")
    if len(rows) < report["asked"]:
        wrong.append(f"{len(rows)} networks ran, and {report['asked']} were asked for an engine")
    for row in rows:
        torch_alone = row["name"].startswith("VAE") and set(row["reasons"]) == {"unsupported model"}
        if (row["native"] or not row["engine"]) and not torch_alone:
            name = row["name"]
            wrong.append(f"{name} ran {row['engine']} calls on its engine and {row['native']} native {row['reasons']}")
    return wrong


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    seconds = report["seconds"]
    lines = [f"{'network':40}{'on engine':>10}{'native':>8}"]
    lines += [f"{row['name']:40}{row['engine']:>10}{row['native']:>8}" for row in report["networks"]]
    lines += [
        "",
        f"difference of the latents    {report['latent_rel_err']:.1e} (limit {MAX_ERROR:.0e})",
        "seconds                      " + ", ".join(f"{name} {value}" for name, value in seconds.items()),
        f"pictures                     {report['images'][-1]}",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the demo; 0 when the pictures agree and everything ran on engines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workflow", nargs="?", choices=WORKFLOWS, default=USUAL, help=f"which one; without: {USUAL}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo", help="folder for pictures and report.json")
    options = parser.parse_args()
    out, name = options.out.resolve(), options.workflow
    comfyui, base = Path(os.environ["HYBRID_TRT_COMFYUI"]), Path(os.environ["HYBRID_TRT_BASE"])
    out.mkdir(parents=True, exist_ok=True)
    for file in ("report.json", "native.png", "engine.png", "side_by_side.png"):
        (out / file).unlink(missing_ok=True)  # what is there afterwards is of this run
    # engines of earlier runs would hide a broken build
    shutil.rmtree(base / "models" / "trt_engines", ignore_errors=True)
    with saying("making small models"):
        make_models(name, comfyui, base)
    with contextlib.ExitStack() as stack:
        stack.enter_context(with_test_nodes(name, base))
        with saying("starting ComfyUI"):
            comfy = stack.enter_context(ComfyProcess(comfyui, base, log=out / "comfyui.log"))
        report = run(name, comfy, out)
    path = out / "report.json"
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(table(report))
    wrong = failures(report)
    for sentence in wrong:
        say(f"FAILED: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
