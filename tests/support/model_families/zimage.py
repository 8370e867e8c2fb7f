"""Z-Image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import zimage
from family_contract import Call, Family, Prompt, model_patch
from hybrid_trt.architectures.shapes import RequestedSizes
from hybrid_trt.comfy_model.network import NativeNetwork
from token_calls import replace_attention

RANDOM, FILE = "random weights", "tiny_zimage"


def network(models: Mapping[str, Path], file: str, dtype: torch.dtype = torch.float32) -> NativeNetwork:
    """A file's network, or one of random weights, in which the padding of tokens acts."""
    return zimage.network(dtype) if file == RANDOM else NativeNetwork.of_model(zimage.load(models[file]), "zimage")


def call(**sizes: int) -> Call:
    return Call(RANDOM, lambda _network, seed: zimage.call(**sizes, seed=seed))


def with_places(**options: float) -> Call:
    return Call(RANDOM, lambda _network, seed: zimage.call(seed=seed) | {"transformer_options": {
        "rope_options": options}})  # fmt: skip


def prompt(**options: object) -> Prompt:
    return Prompt(FILE, zimage.WIDTH, **{"shape": (1, 16, 8, 6), "words": (20, 31), "calls": 6} | options)


FAMILY = Family(
    "zimage",
    network=network,
    profile=lambda net: net.architecture().profile(RequestedSizes(64, 128, 256, 2)),
    calls={
        "small": call(),
        "odd sides, two pictures": call(height=13, width=11, batch=2, tokens=30),
        "a whole number of groups": call(height=16, width=8, tokens=32),
        "several groups": call(height=16, width=16, tokens=40),
        "many tokens": call(height=10, width=34, tokens=100),
        "one token": call(tokens=1),
        "places moved by another node": with_places(scale_x=1.5, shift_y=3.0),
    },
    unlike={"small": ("one token", "places moved by another node")},
    any_size={RANDOM: ("small", "odd sides, two pictures", "several groups", "many tokens")},
    half={"several groups": [torch.float16, torch.bfloat16]},
    refused={"small": [
        ({"ref_latents": [torch.ones(1, 16, 8, 8)]}, "reference images"),
        ({"guidance": torch.ones(1)}, "guidance"),
        ({"context": None}, "no prompt, which"),
    ]},
    ignored={"small": [{
        "attention_mask": torch.zeros(1, 9), "ref_latents": [], "ref_contexts": [torch.ones(1, 3, 64)],
        "siglip_feats": [torch.ones(1, 2, 2, 8)], "control": {"output": [torch.ones(1)]},
        "clip_text_pooled": torch.ones(1, 8)}]},
    prompts={
        "two lengths": prompt(),
        "odd sides, two pictures": prompt(shape=(2, 16, 13, 11), words=(20, 20), calls=3),
        "without CFG": prompt(cfg=1.0, calls=3),
        "a mask and a pooled prompt": prompt(entries=lambda random: {
            "attention_mask": torch.tensor([[1] * 15 + [0] * 5]), "pooled_output": torch.ones(1, 8)}),
    },
    native={"references": prompt(entries=lambda random: {"reference_latents": [random(1, 16, 6, 8)]})},
    loras={"two lengths": ("layers.1.attention.qkv", "context_refiner.0.feed_forward.w2"),
           "without CFG": ("context_refiner.0.feed_forward.w2",)},
    patched=["two lengths"],
    patches={
        "noise_refiner": model_patch("noise_refiner", lambda given: {"img": given["img"] * 1.1}),
        "double_block": model_patch("double_block", lambda given: {"img": given["img"] * 1.1}),
        "attention by": replace_attention,
    },
)  # fmt: skip
