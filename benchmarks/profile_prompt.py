"""What a whole prompt does besides its networks: pauses of the GPU and what the host spends, in a real ComfyUI.

    python benchmarks/profile_prompt.py --comfyui ~/ComfyUI --base /tmp/benchmark --out profile_prompt.json

SD1.5 at 512x512, 20 steps, two ControlNets: native and engines of the torch backend, in both of ComfyUI's ways to load
weights. A prompt is run twice as usual before the one that is profiled, and as often after it for the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import models
import prompts
from prompts import Prompt, node

RUNS = 5
MODES = {"default": [], "disable-dynamic-vram": ["--disable-dynamic-vram"]}


def profiled(controls: int, seed: int, engine: str | None, file: Path, steps: int) -> Prompt:
    """The benchmark's prompt with a sampler that writes figures into a file."""
    made = prompts.sd15_prompt(controls, seed, engine, image=False, steps=steps)
    inputs = made["sampler"]["inputs"]
    kept = {name: inputs[name] for name in ("model", "positive", "negative", "latent_image", "seed", "steps", "cfg")}
    made["sampler"] = node("ProfiledKSampler", **kept, file=str(file))
    return made


def measured(comfy: Any, controls: int, engine: str | None, file: Path, steps: int) -> dict[str, Any]:
    """The figures of one prompt on a server."""
    comfy.queue(prompts.sd15_prompt(controls, 1, engine, "latent", image=False, steps=steps), timeout=500)
    comfy.queue(prompts.sd15_prompt(controls, 2, engine, "latent", image=False, steps=steps))
    history = comfy.queue(profiled(controls, 3, engine, file, steps), timeout=500)
    assert history.ok, history.error
    clock = [comfy.queue(prompts.sd15_prompt(controls, 10 + i, engine, "latent", image=False, steps=steps)).seconds
             for i in range(RUNS)]  # fmt: skip
    return json.loads(file.read_text()) | {"prompt_ms": round(1000 * statistics.median(clock), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--controls", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", default="build now", help="the engine nodes' choice without an engine")
    parser.add_argument("--ways", nargs="+", choices=("native", "engines"), default=["native", "engines"])
    options = parser.parse_args()
    comfyui, base = options.comfyui.resolve(), options.base.resolve()
    models.make(comfyui, base, ["full_sd15", *(f"full_sd15_{'abcd'[i]}" for i in range(options.controls))])
    link = base / "custom_nodes" / "profile_nodes"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(Path(__file__).resolve().parent / "profile_nodes", target_is_directory=True)
    rows = []
    for mode, arguments in MODES.items():
        log = options.out.with_name(f"server_{mode}.log")
        with prompts.server(comfyui, base, log, *arguments) as comfy:
            for name in options.ways:
                engine = None if name == "native" else options.engine
                file = options.out.resolve().with_name(f"{mode}_{name}.json")
                row = {"mode": mode, **measured(comfy, options.controls, engine, file, options.steps)}
                rows.append(row)
                print({k: v for k, v in row.items() if not isinstance(v, list)}, flush=True)
                options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
