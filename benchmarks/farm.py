"""Prompts a minute of a farm with one worker and with several, on GPUs of one machine.

    python benchmarks/farm.py --comfyui ~/ComfyUI --base /tmp/benchmark --workers 1 2 --out benchmarks/results/farm.json

SD1.5 with a ControlNet at 512 px, 20 steps, VAE and PNG included; engines are live weights as CUDA graphs. Each number
of workers is a farm of its own, warmed by the workflow, that renders the same batch by ``python -m farm render``.
It needs a GPU for each worker, a Python with Ray (--ray, see farm/requirements.txt), 6 GB of disk, and no network.
``--tiny`` takes tiny models and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "support"), str(ROOT / "tools")]

import models
import prompts
from scenarios import A, Prompt, Scenario, node, prompt

PROMPTS, SETTLING = 60, 4
"""Prompts that are timed, and those before the clock starts."""
PATIENCE = 240.0
ENGINE = {"when_missing": "use native", "backend": "torch", "precision": "auto", "max_images": 1, "max_tokens": 77}


def workflow(tiny: bool) -> Prompt:
    """One picture by a UNet and a ControlNet on engines."""
    side, steps = (64, 2) if tiny else (512, 20)
    sizes = {"min_size": 64, "opt_size": side, "max_size": side}
    made = prompt(Scenario(controls=(A,), steps=steps, width=side, height=side, settings=ENGINE | sizes), True, "")
    del made["save"], made["report"]
    if not tiny:
        made["unet"] = node("CheckpointLoaderSimple", ckpt_name="full_sd15.safetensors")
        (net,) = [one for one in made.values() if one["class_type"] == "ControlNetLoader"]
        net["inputs"]["control_net_name"] = "full_sd15_a.safetensors"
    made["vae"] = node("VAELoader", vae_name=f"{'tiny' if tiny else 'full'}_kl.safetensors")
    made["decode"] = node("VAEDecode", samples=["sampler", 0], vae=["vae", 0])
    made["picture"] = node("SaveImage", images=["decode", 0], filename_prefix="farm/picture")
    return made


@contextlib.contextmanager
def farm(options: argparse.Namespace, workers: int, warm: Path, log: Path) -> Iterator[str]:
    """Yield the address of a farm whose workers are ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [str(options.ray), "-m", "farm", "serve", "--comfyui", str(options.comfyui), "--base", str(options.base),
               "--python", str(options.python), "--port", url.rpartition(":")[2], "--workers", str(workers),
               "--warm", str(warm), *(["--cpu"] if options.tiny else []), "--", "--front-end-root",
               str(prompts.prepared(options.base)), *([] if options.tiny else ["--disable-dynamic-vram"])]  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                   env=variables())  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while ready(url) < workers:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the farm is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def variables() -> dict[str, str]:
    """Those of the farm: a token, and no packages of the Python that runs ComfyUI."""
    return os.environ | {"HYBRID_TRT_FARM_TOKEN": "a-token-for-benchmarks", "PYTHONPATH": ""}


def ready(url: str) -> int:
    """Return the number of workers that are ready."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:
            return json.load(answer)["workers"]
    except (OSError, ValueError, KeyError):
        return 0


def render(options: argparse.Namespace, url: str, warm: Path, seeds: str, out: Path) -> float:
    """Render a batch; return its seconds, the start of the client included."""
    command = [str(options.ray), "-m", "farm", "render", str(warm), "--seeds", seeds, "--out", str(out), "--url", url]
    begun = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, env=variables(), stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def measure(options: argparse.Namespace, workers: int, warm: Path, folder: Path) -> dict[str, Any]:
    """Start a farm, and time a batch."""
    begun = time.perf_counter()
    with farm(options, workers, warm, folder / f"farm_{workers}.log") as url:
        started = time.perf_counter() - begun
        render(options, url, warm, f"1-{SETTLING * workers}", folder / f"before_{workers}")
        nothing = min(render(options, url, warm, "1", folder / f"before_{workers}") for _ in range(2))
        seconds = render(options, url, warm, f"101-{100 + options.prompts}", folder / f"pictures_{workers}") - nothing
    return {"workers": workers, "prompts_a_minute": round(60 * options.prompts / seconds, 1),
            "seconds": round(seconds, 2), "client_s": round(nothing, 2), "ready_after_s": round(started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's source, its requirements installed")
    parser.add_argument("--base", type=Path, required=True, help="where models, engines and outputs go")
    parser.add_argument("--ray", type=Path, default=Path(sys.executable), help="the Python that has Ray")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the Python that runs ComfyUI")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.comfyui, options.base = options.comfyui.resolve(), options.base.resolve()
    if not options.tiny:
        models.make(options.comfyui, options.base, ["full_sd15", "full_kl", "full_sd15_a"])
    folder = options.out.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    warm = folder / "workflow.json"
    warm.write_text(json.dumps(workflow(options.tiny)))
    rows = [measure(options, workers, warm, folder) for workers in options.workers]
    for row in rows:
        row["times_one"] = round(row["prompts_a_minute"] / rows[0]["prompts_a_minute"], 2)
    found = {"command": " ".join(["python benchmarks/farm.py", *sys.argv[1:]]), "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
