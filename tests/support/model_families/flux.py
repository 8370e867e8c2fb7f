"""Flux.1 and Flux.2."""

from __future__ import annotations

from typing import Any

import flux_networks
import torch
from family_contract import Call, Family, Models, Prompt
from flux_networks import LAYOUTS, residuals
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.comfy_model.network import NativeNetwork
from token_calls import network_of, profile_of

from .token_data import references

FILE, FP8 = "tiny_flux1_unet", "tiny_flux1_fp8_unet"
PROFILE = Profile({"B": Range(1, 1, 2), "N": Range(4, 24, 300), "T": Range(1, 9, 64)})
TWO = ((10, 8), (7, 9))
"""Sizes of two pictures that are referred to."""
CASES: dict[str, dict[str, Any]] = {
    "a picture": {},
    "batch 2, an odd size, a long prompt": {"batch": 2, "size": (13, 11), "prompt": 30},
    "two references": {"references": TWO},
    "two references side by side": {"references": TWO, "ref_latents_method": "uxo"},
    "two references by index": {"references": TWO, "ref_latents_method": "index", "batch": 2, "size": (9, 8)},
    "a prompt for ControlNets alone": {"crossattn_controlnet": torch.ones(1, 9, 48)},
    "places changed by another node": {"transformer_options": {
        "rope_options": {"scale_x": 1.5, "scale_y": 0.7, "shift_t": 2.0, "shift_x": 3.0, "shift_y": 1.0}}},
}  # fmt: skip
CONTROLS = {
    "all": ("ab", "cde"), "the first alone": ("a", ""), "some": (".a", "b.a"), "one in all": ("aa", "aaa"),
    "more than it has blocks": ("abab", "abcabc"), "none": ("..", "..."),
}  # fmt: skip
"""Residuals at the double and at the single blocks."""
ACTING = [name for name in CONTROLS if name != "none"]


def call(layout: str, control: str = "", **changes: Any) -> Call:
    """A call with residuals of ControlNets, which are made once for a whole batch."""

    def draw(network: NativeNetwork, seed: int) -> dict[str, Any]:
        tokens = 24 if network.module.params.patch_size == 2 else 96
        more = {"control": residuals(network, tokens, *CONTROLS[control])} if control else {}
        return flux_networks.call(network, seed=seed, **changes, **more)

    return Call(layout, draw)


def network(models: Models, file: str, dtype: torch.dtype = torch.float32) -> NativeNetwork:
    """A random network of a layout, or that of a file."""
    with torch.inference_mode(file == FP8):  # as ComfyUI runs loaders, which quantised weights need
        return flux_networks.network(file, dtype) if file in LAYOUTS else network_of(models, file)


def prompt(file: str = FILE, **options: Any) -> Prompt:
    return Prompt(file, 64, **{"shape": (1, 16, 8, 6), "pooled": 32} | options)


LORA = tuple(f"{layer}_blocks.{i}.{part}" for i, layer, part in (
    (0, "double", "img_attn.qkv"), (1, "double", "txt_mlp.0"), (0, "single", "linear1")))  # fmt: skip

FAMILY = Family(
    "flux",
    network=network,
    profile=lambda network: PROFILE if network.label in LAYOUTS else profile_of(network),
    calls={f"{layout}: {name}": call(layout, **changes) for layout in LAYOUTS for name, changes in CASES.items()} | {
        f"{layout}: {name} residuals, batch {batch}": call(layout, name, batch=batch)
        for layout in ("dev", "ovis", "flux2", "klein") for name in CONTROLS for batch in (1, 2)} | {
        "dev: all residuals, references": call("dev", "all", references=TWO),
        "dev: no pooled prompt": call("dev", y=None)},
    unlike={f"{layout}: a picture": tuple(f"{layout}: {name} residuals, batch 1" for name in ACTING)
            for layout in ("dev", "flux2")} | {
        "dev: two references": (
            "dev: all residuals, references", "dev: all residuals, batch 1", "dev: a picture", "dev: no pooled prompt",
            "dev: two references side by side", "dev: places changed by another node")},
    any_size={layout: tuple(f"{layout}: {name}" for name in (
        "a picture", "batch 2, an odd size, a long prompt", "two references", "some residuals, batch 1"))
              for layout in ("dev", "klein")},
    steady={"dev: a picture": ("pe_prompt", "pe_image")},
    refused={"dev: a picture": [
        ({"attention_mask": torch.ones(1, 1, 33, 33)}, "attention_mask"),
        ({"guidance": None}, "no guidance, which"),
        ({"ref_latents": [torch.zeros(1, 16, 10, 8)], "ref_latents_method": "index_timestep_zero"},
         "which engines of this model do not do"),
        ({"something_new": 1}, "something_new"),
    ]},
    prompts={
        "two lengths": prompt(words=(9, 30), calls=6),
        "another guidance": prompt(entries=lambda random: {"guidance": 2.0}, cfg=1.0),
        "a reference": prompt(entries=references((12, 12), row=False, guidance=2.5), cfg=1.0),
        "two references beside each other": prompt(entries=references((12, 12), (8, 8), method="uxo", row=False)),
        "two references by index": prompt(entries=references((12, 12), (8, 8), method="index", row=False), cfg=1.0),
        "weights in fp8": prompt(FP8),
    },
    native={"no guidance": prompt(entries=lambda random: {"guidance": None})},
    loras={"two lengths": LORA, "weights in fp8": LORA},
    slow={"test_one_compiled_file_serves_calls_of_all_sizes": ("dev", "klein"),  # ``test_blocks.py`` compiles such
          "test_one_engine_of_onnx_runtime_serves_all_calls": ("schnell", "fill", "flux2", "ovis"),
          "test_whole_prompts_are_natives": (f"{FP8}, onnxruntime",)},
)  # fmt: skip
