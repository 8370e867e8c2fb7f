"""What a UNet's convolutions take by cuDNN's ways to choose an algorithm, and its products with a bias in them.

    python benchmarks/kernel_libraries.py --family sd15 --comfyui ~/ComfyUI --out libraries.json

Every way has a process of its own: torch keeps the first algorithm that it takes for a shape. Each shape is timed as a
CUDA graph over several sets of random tensors, float16, batch 2; no model file is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import networks
import torch

WAYS = {"heuristics": (False, 10, "0"), "mode_b": (False, 10, "1"), "timed": (True, 10, "0"),
        "all_timed": (True, 0, "0")}  # fmt: skip
"""Way -> ``cudnn.benchmark``, its limit (0: none), and whether torch asks heuristics of mode B."""
MODE_B = "TORCH_CUDNN_USE_HEURISTIC_MODE_B"
SETS = 4


def shapes(family: str, comfyui: Path) -> tuple[Counter, Counter]:
    """How often a UNet has each convolution (images, in, out, height, width, kernel, stride) and each product with a
    bias (rows, in, out), found without memory or a GPU."""
    networks.import_pack(comfyui)
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from hybrid_trt.architectures.ldm import transformer_options

    config = models.CONFIGS[family]
    unet = UNetModel(**config, dtype=torch.float16, device="meta", operations=comfy.ops.disable_weight_init)
    convolutions, products = Counter(), Counter()

    def seen(layer: torch.nn.Module, given: tuple, _result: object) -> None:
        x = given[0]
        if isinstance(layer, torch.nn.Conv2d):
            convolutions[(*x.shape[:2], layer.out_channels, *x.shape[2:], layer.kernel_size[0], layer.stride[0])] += 1
        elif layer.bias is not None:
            products[(x.numel() // x.shape[-1], layer.in_features, layer.out_features)] += 1

    for layer in unet.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(seen)
    size = networks.SIZES[family]
    x, context = (torch.empty(shape, dtype=torch.float16, device="meta")
                  for shape in ((2, 4, size, size), (2, 77, config["context_dim"])))  # fmt: skip
    y = torch.empty(2, config["adm_in_channels"], dtype=x.dtype, device="meta") if "adm_in_channels" in config else None
    with torch.no_grad():
        unet._forward(x, torch.empty(2, device="meta"), context, y, None, transformer_options())
    return convolutions, products


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Of one of ``calls`` that ``call`` makes, by a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return round(networks.gpu_ms(graph.replay)["median"] * 1000 / calls, 2)


def random(*shape: int) -> torch.Tensor:
    made = torch.randn(shape, device="cuda", dtype=torch.float16) * 0.05
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 else made


def convolution(images: int, wide: int, out: int, height: int, width: int, kernel: int, stride: int) -> float:
    sets = [(random(images, wide, height, width), random(out, wide, kernel, kernel)) for _ in range(SETS)]
    half = kernel // 2
    return microseconds(lambda: [torch.conv2d(x, w, None, stride, half) for x, w in sets], SETS)


def product(rows: int, wide: int, out: int) -> dict[str, float]:
    sets = [(random(rows, wide), random(out, wide), random(out)) for _ in range(SETS)]
    return {"with_bias": microseconds(lambda: [torch.nn.functional.linear(*one) for one in sets], SETS),
            "without": microseconds(lambda: [x @ w.t() for x, w, _ in sets], SETS)}  # fmt: skip


def measure(way: str, family: str, comfyui: Path) -> dict[str, Any]:
    """One way's figures, in this process."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit, _ = WAYS[way]
    convolutions, products = shapes(family, comfyui)
    taken = {shape: convolution(*shape) for shape in convolutions}
    total = sum(taken[shape] * count for shape, count in convolutions.items()) / 1000
    found = {"ms": round(total, 3), "us": {str(shape): us for shape, us in taken.items()}}
    if way == "heuristics":
        found["products"] = {str(shape): product(*shape) for shape in products}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=networks.SIZES, required=True)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    options = parser.parse_args()
    if options.way:
        found = measure(options.way, options.family, options.comfyui)
        print({name: value for name, value in found.items() if name == "ms"})
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    found = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    for way, (_, _, mode_b) in WAYS.items():
        subprocess.run([sys.executable, *sys.argv, "--way", way], check=True, env=os.environ | {MODE_B: mode_b})
        found[way] = json.loads(options.out.read_text())
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
