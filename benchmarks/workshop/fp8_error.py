"""Error of SDXL's UNet when linears take float8, found by rounding their inputs and weights, on a CPU.

    python benchmarks/workshop/fp8_error.py --comfyui ~/ComfyUI --base /tmp/benchmark --out fp8_error.json

Each row of the inputs and each output's weights have a scale of their own, as ``torch._scaled_mm`` takes them; products
are then summed up in float32, so a GPU's own rounding comes on top. A full-size model with random weights in float32
takes 10 GB and a minute a row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
import networks

LARGEST = 448.0
"""Of float8_e4m3fn."""
GROUPS: dict[str, tuple[str, ...]] = {
    "all linears of the transformers": ("transformer_blocks",),
    "feed-forward": (".ff.",),
    "second half of feed-forward": (".ff.net.2",),
    "query, key and value of self-attention": (".attn1.to_q", ".attn1.to_k", ".attn1.to_v"),
    "output of attention": (".to_out.",),
    "cross-attention": (".attn2.",),
}


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Float32 values as float8_e4m3fn has them, with a scale for each row (the last axis)."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def load(comfyui: Path, base: Path) -> torch.nn.Module:
    """SDXL's UNet in float32 on the CPU."""
    sys.path.append(str(comfyui))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    networks.import_pack(comfyui)
    import comfy.sd

    (path,) = models.make(comfyui, base, ["full_sdxl"]).values()
    return comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32}).model.diffusion_model


def linears(unet: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linears of its transformers by name."""
    return {
        name: module
        for name, module in unet.named_modules()
        if isinstance(module, torch.nn.Linear) and "transformer_blocks" in name
    }


def in_float8(layer: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear's forward with inputs and weights rounded."""
    return lambda x: torch.nn.functional.linear(rounded(x), rounded(layer.weight), layer.bias)


def errors(value: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Relative error in the 2-norm, and the PSNR in dB of the reference's range."""
    difference = value - reference
    spread = float(reference.max() - reference.min())
    return {"rel_err": round(float(difference.norm() / reference.norm()), 5),
            "psnr_db": round(20 * math.log10(spread / float(difference.square().mean().sqrt())), 1)}  # fmt: skip


def measure(unet: torch.nn.Module, size: int) -> list[dict[str, Any]]:
    """The error of one product, and that of a call for each group of linears."""
    draw = torch.Generator().manual_seed(0)
    x, context = torch.randn(1, 4, size, size, generator=draw), torch.randn(1, 77, 2048, generator=draw)
    y, layers = torch.randn(1, 2816, generator=draw), linears(unet)

    def call() -> torch.Tensor:
        return unet(x, torch.tensor([500.0]), context=context, y=y)

    given, weight = torch.randn(2048, 1280, generator=draw), torch.randn(1280, 1280, generator=draw)
    rows = [{"what": "one product", **errors(rounded(given) @ rounded(weight).T, given @ weight.T)}]
    reference = call()
    for title, parts in GROUPS.items():
        chosen = {name: layer for name, layer in layers.items() if any(part in name for part in parts)}
        for layer in chosen.values():
            layer.forward = in_float8(layer)
        rows.append({"what": title, "layers": len(chosen), **errors(call(), reference)})
        for layer in chosen.values():
            del layer.forward  # the class's own is there again
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=64, help="of the latent, 64 for a picture of 512 px")
    options = parser.parse_args()
    with torch.inference_mode():
        rows = measure(load(options.comfyui, options.base), options.size)
    told = {
        "command": "python benchmarks/workshop/fp8_error.py --comfyui ... --base ... --out ...",
        "machine": "a CPU, float32",
        "network": "SDXL's UNet, full size, random weights, one image of 8 x --size px, 77 tokens, timestep 500",
        "size": options.size,
        "torch": torch.__version__,
        "rows": rows,
    }
    options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
