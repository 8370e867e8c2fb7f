"""What angles of half precision do to a network: those of the sines that tell it the timestep, all else in float32.

    python benchmarks/timestep_error.py --comfyui ~/ComfyUI --base /tmp/benchmark --out timestep_error.json

Engines whose builder picks precisions by itself (TensorRT 8.6) may compute them so. Full-size models with random
weights on a CPU, one image of 256 px, 77 tokens: three minutes, 12 GB of memory for SDXL.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import networks
import torch

TIMESTEPS = (900.0, 500.0, 50.0)
SIZE = 32
NETWORKS = ("sd15_controlnet", "sd15_unet", "sdxl_unet")
Call = Callable[[float], list[torch.Tensor]]


def half_angles(timesteps: torch.Tensor, dim: int, *_: Any, **__: Any) -> torch.Tensor:
    """ComfyUI's ``timestep_embedding`` with frequencies, angles and results rounded to float16."""
    count = dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(count, dtype=torch.float32) / count).half()
    angles = (timesteps[:, None].half() * frequencies[None]).float()
    return torch.cat([angles.cos(), angles.sin()], -1).half().float()


def load(name: str, comfyui: Path, base: Path) -> Call:
    """A network in float32 as a function of the timestep: its outputs for inputs that stay the same."""
    import comfy.controlnet
    import comfy.sd

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, SIZE, SIZE, generator=draw)
    context = torch.randn(1, 77, 2048 if name.startswith("sdxl") else 768, generator=draw)
    file = {"sd15_unet": "full_sd15", "sd15_controlnet": "full_sd15_a", "sdxl_unet": "full_sdxl"}[name]
    (path,) = map(str, models.make(comfyui, base, [file]).values())
    full = {"dtype": torch.float32}
    if name == "sd15_controlnet":
        net = comfy.controlnet.load_controlnet(path).control_model.float()
        hint = torch.rand(1, 3, 8 * SIZE, 8 * SIZE, generator=draw)

        def residuals(t: float) -> list[torch.Tensor]:
            made = net(x=x, hint=hint, timesteps=torch.tensor([t]), context=context)
            return [*made["output"], *made["middle"]]

        return residuals
    if name == "sdxl_unet":
        unet = comfy.sd.load_diffusion_model(path, model_options=full)
        extra = {"y": torch.randn(1, 2816, generator=draw)}
    else:
        unet, extra = comfy.sd.load_checkpoint_guess_config(path, False, False, model_options=full)[0], {}
    module = unet.model.diffusion_model.float()
    return lambda t: [module(x, torch.tensor([t]), context=context, **extra)]


def rows(name: str, call: Call) -> list[dict[str, Any]]:
    """The worst output's relative error for each timestep."""
    from comfy.cldm import cldm
    from comfy.ldm.modules.diffusionmodules import openaimodel

    exact, found = openaimodel.timestep_embedding, []
    for t in TIMESTEPS:
        results = []
        for embedding in (exact, half_angles):
            openaimodel.timestep_embedding = cldm.timestep_embedding = embedding
            results.append(call(t))
        errors = [float((half - full).norm() / full.norm()) for full, half in zip(*results, strict=True)]
        found.append({"network": name, "t": t, "rel_err": round(max(errors), 5)})
        print(found[-1], flush=True)
    openaimodel.timestep_embedding = cldm.timestep_embedding = exact
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sys.path.append(str(options.comfyui))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    networks.import_pack(options.comfyui)
    found = []
    with torch.inference_mode():
        for name in NETWORKS:
            found += rows(name, load(name, options.comfyui, options.base))
    command = "python benchmarks/timestep_error.py --comfyui ... --base ... --out ..."
    told = {"command": command, "machine": "a CPU, float32", "torch": torch.__version__, "rows": found}
    options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
