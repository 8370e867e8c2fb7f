"""Milliseconds that a changed prompt costs in the text encoders of each family: native, and compiled by torch.

    python benchmarks/workshop/text_encoders.py --comfyui ~/ComfyUI --out benchmarks/results/text_encoders.json

Each row is a family: ``native_ms`` is the median of *CLIP Text Encode* with another prompt each time, tokenizing
included, the model on the GPU already; ``compiled_ms`` the same with the encoders' networks compiled by torch.compile,
``graph_ms`` with CUDA graphs too. ``rel_err`` compares compiled with native. Weights are random, made on the GPU.
``--cpu`` tries it with the smallest one.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPEATS, WARM = 20, 3
WORDS = "house lake river tree cloud stone light bird".split()
FAMILIES = {
    "sd15": ("sd1_clip", "SD1Tokenizer", "SD1ClipModel"), "sdxl": ("sdxl_clip", "SDXLTokenizer", "SDXLClipModel"),
    "flux1": ("text_encoders.flux", "FluxTokenizer", "flux_clip"),
    "zimage": ("text_encoders.z_image", "ZImageTokenizer", "te"),
    "anima": ("text_encoders.anima", "AnimaTokenizer", "te"),
    "krea2": ("text_encoders.krea2", "Krea2Tokenizer", "te"),
    "qwen_image": ("text_encoders.qwen_image", "QwenImageTokenizer", "te"),
}
"""Family -> ComfyUI's module, and what makes its tokenizer and its encoders. Wan's tokenizer is in its file alone."""


def encoder(family: str) -> Any:
    """Return a CLIP of ComfyUI's with random weights, on its device."""
    import comfy.sd
    from comfy import model_management
    from comfy.supported_models_base import ClipTarget

    place, tokenizer, network = FAMILIES[family]
    module = importlib.import_module(f"comfy.{place}")
    made = getattr(module, network)
    if not isinstance(made, type):
        made = made(torch.bfloat16)
    device = model_management.text_encoder_device()
    clip = comfy.sd.CLIP(ClipTarget(getattr(module, tokenizer), made), model_options={"initial_device": device})
    with torch.no_grad():
        for name, one in clip.cond_stage_model.named_parameters():
            if one.ndim > 1:
                one.normal_(0, one.shape[-1] ** -0.5)
            else:
                one.fill_(1.0 if name.endswith("weight") else 0.0)
    clip.load_model()
    return clip


def prompt(number: int) -> str:
    """Return another prompt of the same length."""
    return "a photograph of a " + " and a ".join(WORDS[(number * 3 + i) % len(WORDS)] for i in range(10))


def timed(clip: Any, begin: int) -> float:
    """Return the median milliseconds of an encoded prompt, on the host's clock."""
    found = []
    for number in range(begin, begin + WARM + REPEATS):
        synchronize()
        started = time.perf_counter()
        clip.encode_from_tokens_scheduled(clip.tokenize(prompt(number)))
        synchronize()
        found.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(found[WARM:]), 2)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def encoded(clip: Any) -> torch.Tensor:
    return clip.encode_from_tokens_scheduled(clip.tokenize(prompt(0)))[0][0].float().cpu().clone()


def compiled(clip: Any, mode: str | None) -> Callable[[], None]:
    """Compile the networks of all encoders, and return what takes that back."""
    networks = [part.transformer for part in clip.cond_stage_model.modules() if hasattr(part, "transformer")
                and isinstance(part.transformer, torch.nn.Module)]  # fmt: skip
    for network in networks:
        network.forward = torch.compile(network.forward, mode=mode)

    def undo() -> None:
        for network in networks:
            del network.forward
        torch._dynamo.reset()

    return undo


def measure(family: str) -> dict[str, Any]:
    """Return the row of a family."""
    clip = encoder(family)
    size = sum(one.numel() * one.element_size() for one in clip.cond_stage_model.parameters())
    row = {"family": family, "gigabytes": round(size / 1e9, 2), "native_ms": timed(clip, 0)}
    native = encoded(clip)
    for name, mode in {"compiled": None, "graph": "reduce-overhead"}.items():
        try:
            started, undo = time.perf_counter(), compiled(clip, mode)
            found = encoded(clip)
            row[f"{name}_first_s"] = round(time.perf_counter() - started, 1)
            row[f"{name}_rel_err"] = float((found - native).norm() / native.norm())
            row[f"{name}_ms"] = timed(clip, 100)
            undo()
        except Exception as error:  # torch cannot compile each of them
            row[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:300]}"
            undo()
    return row | {"tokens": list(native.shape)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    sys.path.append(str(options.comfyui.resolve()))
    sys.argv = sys.argv[:1]  # ComfyUI reads them too
    from comfy.cli_args import args

    args.cpu, args.disable_dynamic_vram = options.cpu, True
    rows = []
    for family in options.families[:1] if options.cpu else options.families:
        with torch.inference_mode():
            rows.append(measure(family))
        print(json.dumps(rows[-1]), flush=True)
        gpu = "" if options.cpu else torch.cuda.get_device_name(0)
        command = "python benchmarks/workshop/text_encoders.py"
        found = {"command": command, "gpu": gpu, "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        from comfy import model_management

        model_management.unload_all_models()
        gc.collect()


if __name__ == "__main__":
    main()
