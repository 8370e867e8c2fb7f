"""What happens on a GPU that TensorRT-RTX refuses: a real prompt in a real ComfyUI, with an engine in the library.

    python tools/environment.py run -- python benchmarks/wrong_gpu.py --out wrong_gpu.json

Makes tiny random models, builds their TensorRT-RTX engines as on a machine without a GPU (for all RTX cards), then
samples the same prompt with stock nodes and with the engine nodes. Every call has to run native for the reason "wrong
GPU", and the latent has to be native's to the last bit. TensorRT-RTX itself is asked too, past the pack's own check.

Ends with 0 when that is so, 1 when it is not, and 2 on a card on which engines run and which so has nothing to show. On
a machine without any GPU it shows the same of the CPU. What is in the base directory's library is deleted first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).resolve().parent.parent
TOOLS, SUPPORT = ROOT / "tools", ROOT / "tests" / "support"
sys.path[:0] = [str(TOOLS), str(SUPPORT)]

from comfy_process import ComfyProcess
from scenarios import Control, Scenario, latent_of, prompt, relative_difference

BACKEND = "tensorrt_rtx"
MODELS = {"--unet": "tiny_sd15_flat_unet", "--controlnet": "tiny_sd15_flat_a"}
REASON = "wrong GPU"
PACKAGES = ("torch", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "onnx", "onnxruntime", "polygraphy")

OPEN_ENGINE = """
import json, pathlib, sys, torch
from hybrid_trt.backends import backends
from hybrid_trt.engine_library import Engine, Manifest, Unavailable
backend = backends()["tensorrt_rtx"]
folder = pathlib.Path(sys.argv[1])
try:
    backend.load(Engine(folder, Manifest.read(folder / "manifest.json")), torch.device("cuda", 0))
    print(json.dumps({"opened": True}))
except Unavailable as refused:
    print(json.dumps({"opened": False, "reason": refused.fallback.reason.value, "detail": refused.fallback.detail}))
"""


def say(text: str) -> None:
    """One progress line on stderr."""
    print(f"[wrong_gpu] {text}", file=sys.stderr, flush=True)


def gpu() -> dict[str, Any] | None:
    """Name and compute capability of the GPU that the server will use, or None."""
    if not torch.cuda.is_available():
        return None
    return {"name": torch.cuda.get_device_name(0), "compute_capability": list(torch.cuda.get_device_capability(0))}


def versions() -> dict[str, str]:
    """What was installed."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def make_models(comfyui: Path, base: Path) -> None:
    """The tiny models below the base directory."""
    command = [sys.executable, str(TOOLS / "tiny_models.py"), "--comfyui", str(comfyui), "--models",
               str(base / "models"), *MODELS.values()]
    subprocess.run(command, check=True, stdout=sys.stderr)


def command_line(comfyui: Path, base: Path, *arguments: str, **environment: str) -> Any:
    """The JSON that one of the pack's commands answers."""
    library = base / "models" / "trt_engines"
    command = [sys.executable, "-m", "engine_builder", *arguments, "--comfyui", str(comfyui), "--library", str(library),
               "--json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True,
                          check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stdout[-2000:]}")
    return json.loads(done.stdout)


def build_engines(comfyui: Path, base: Path) -> list[dict[str, Any]]:
    """The models' engines, built as where there is no GPU; their manifests."""
    found = []
    for option, name in MODELS.items():
        folder = "diffusion_models" if option == "--unet" else "controlnet"
        file = base / "models" / folder / f"{name}.safetensors"
        say(f"building the {BACKEND} engine of {name}")
        found.append(command_line(
            comfyui, base, "build", option, str(file), "--backend", BACKEND, "--precision", "float16",
            "--max-size", "512", CUDA_VISIBLE_DEVICES=""))
    return found


def ask_the_runtime(folder: str) -> dict[str, Any]:
    """What TensorRT-RTX itself says when it is to open an engine here, past the pack's look at the GPU."""
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'engine_builder')!r})\n"
    script += f"import standalone; standalone.load_pack()\n{OPEN_ENGINE}"
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"opened": False, "exit_status": done.returncode, "stderr": done.stderr[-2000:]}
    return json.loads(lines[-1])


@contextmanager
def server(comfyui: Path, base: Path, log: Path, cpu: bool) -> Iterator[ComfyProcess]:
    """A server with the pack and the test nodes; it needs no web front end."""
    page = base / "page"
    page.mkdir(parents=True, exist_ok=True)
    (page / "index.html").write_text("<html></html>", encoding="utf-8")
    nodes = base / "custom_nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    links = {"hybrid-trt": ROOT, "comfy_test_nodes": ROOT / "tests" / "comfy_test_nodes"}
    made = []
    for name, target in links.items():
        if not (nodes / name).is_symlink():
            (nodes / name).symlink_to(target, target_is_directory=True)
            made.append(nodes / name)
    try:
        # --deterministic: two native runs agree to the bit, so a difference means something
        with ComfyProcess(comfyui, base, arguments=["--front-end-root", str(page), "--deterministic"], log=log, cpu=cpu,
                          start_timeout=300) as comfy:
            yield comfy
    finally:
        for link in made:
            link.unlink()


def sample(comfy: ComfyProcess, scenario: Scenario, engines: bool, name: str) -> tuple[numpy.ndarray, dict | None]:
    """The latent, and TRT Report's counts when engine nodes were there; nothing comes from ComfyUI's cache."""
    comfy.free()
    history = comfy.queue(prompt(scenario, engines, name), timeout=300)
    latent = latent_of(history)
    return latent, history.output("report", "report")[0] if engines else None


def prompts(comfyui: Path, base: Path, log: Path, cpu: bool) -> dict[str, Any]:
    """All runs of the prompt, each compared with native's second one.

    The first run of a process may differ from all later ones, native or not: CUDA libraries choose kernels then.
    """
    unet, net = MODELS["--unet"], MODELS["--controlnet"]
    scenario = Scenario(unet=unet, controls=(Control(net, 1, 0.8),), steps=6,
                        settings={"precision": "float16", "backend": BACKEND})
    with server(comfyui, base, log, cpu) as comfy:
        say("sampling native")
        first, _ = sample(comfy, scenario, False, "first")
        native, _ = sample(comfy, scenario, False, "native")
        rows: dict[str, Any] = {
            "native, first in its process": difference(first, native),
            "native again": difference(sample(comfy, scenario, False, "again")[0], native),
            "native without the ControlNet": difference(
                sample(comfy, scenario.but(controls=()), False, "without")[0], native),
        }
        say(f"sampling with engine nodes, backend {BACKEND}")
        settings = {**scenario.settings, "backend": BACKEND}
        latent, report = sample(comfy, scenario.but(settings=settings), True, "engine")
        rows[BACKEND] = difference(latent, native) | {"rows": report["rows"]}
    return rows


def difference(latent: numpy.ndarray, native: numpy.ndarray) -> dict[str, Any]:
    """How a latent differs from native's."""
    return {"identical": latent.tobytes() == native.tobytes(),
            "relative_difference": relative_difference(latent, native)}


def failures(report: dict[str, Any]) -> list[str]:
    """What is not as it has to be, in sentences."""
    wrong, runs = [], report["prompts"]
    if not runs["native again"]["identical"]:
        wrong.append("two native runs differ, so nothing can be told from the others")
    if runs["native without the ControlNet"]["identical"]:
        wrong.append("the comparison does not see a missing ControlNet")
    rows = runs[BACKEND]["rows"]
    if not runs[BACKEND]["identical"]:
        wrong.append("the latent is not native's")
    if len(rows) != len(MODELS) or any(row["engine"] or not row["native"] for row in rows):
        wrong.append(f"not every call ran native: {rows}")
    if any(set(row["reasons"]) != {REASON} for row in rows):
        wrong.append(f"the reason is not {REASON!r}: {rows}")
    for entry in report["library"]:
        if not entry["reason"].startswith(REASON):
            wrong.append(f"{entry['folder']} is listed as {entry['state']}: {entry['reason']}")
    asked = report["runtime"]
    if asked is not None and (asked["opened"] or asked.get("reason") != REASON):
        wrong.append(f"TensorRT-RTX itself did not refuse the engine for this GPU: {asked}")
    return wrong


def main() -> int:
    """Build, sample, compare; see the module's first lines for the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("HYBRID_TRT_COMFYUI"), help="ComfyUI's folder")
    parser.add_argument("--base", type=Path, default=os.environ.get("HYBRID_TRT_BASE"), help="its --base-directory")
    parser.add_argument("--out", type=Path, default=Path("wrong_gpu.json"), help="the JSON to write")
    options = parser.parse_args()
    if not options.comfyui or not options.base:
        parser.error("give --comfyui and --base, or run it through tools/environment.py")
    card = gpu()
    if card is not None and tuple(card["compute_capability"]) in {(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)}:
        say(f"engines run on this {card['name']}: there is nothing to show here")
        return 2
    base = options.base.resolve()
    shutil.rmtree(base / "models" / "trt_engines", ignore_errors=True)
    make_models(options.comfyui, base)
    manifests = build_engines(options.comfyui, base)
    listed = command_line(options.comfyui, base, "list")["engines"]
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python benchmarks/wrong_gpu.py",
        "gpu": card,
        "versions": versions(),
        "engines": [{"name": Path(m["folder"]).name, "built_for": m["identity"]["device"], "parity": m["parity"],
                     "bytes": sum(f["bytes"] for f in m["files"].values())} for m in manifests],
        "library": [{"folder": Path(e["folder"]).name, "state": e["state"], "reason": e["reason"]} for e in listed],
        "runtime": ask_the_runtime(manifests[0]["folder"]) if card else None,
        "prompts": prompts(options.comfyui, base, options.out.with_suffix(".log").resolve(), card is None),
    }
    report["failures"] = failures(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    for sentence in report["failures"]:
        say(f"FAILED: {sentence}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
