"""Anima."""

from __future__ import annotations

import torch
from family_contract import Family, Sizes, model_patch
from hybrid_trt.architectures.shapes import Picture
from token_calls import Call, replace_attention

from .token_data import calls_of, prompts_of

FILE, WIDTH = "tiny_anima", 1024

FAMILY = Family(
    "anima",
    calls=calls_of(FILE, WIDTH, {
        "plain": Call(),
        "odd sides, a batch": Call(2, (13, 11), 30),
        "a prompt of one token": Call(words=1),
        "the longest prompt": Call(1, (5, 9), 128),
    }),
    half={"odd sides, a batch": [torch.float16, torch.bfloat16]},
    steady={"plain": ("pe",)},
    refused={"plain": [
        ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several frames"),
        ({"timesteps": torch.zeros(1, 1)}, "noise of its own for parts"),
        ({"padding_mask": torch.zeros(1, 1, 8, 6)}, "padding_mask"),
        ({"fps": torch.ones(1)}, "fps"),
        ({"t5xxl_ids": torch.zeros(1, 9)}, "t5xxl_ids"),
        ({"context": None}, "no prompt"),
        ({"control": {"input": [torch.zeros(1)]}}, "control"),
        ({"of_another_pack": 1}, "of_another_pack"),
    ]},
    prompts=prompts_of(FILE, WIDTH),
    loras={"one length": tuple(f"blocks.{i}.{layer}" for i in range(2)
                               for layer in ("self_attn.q_proj", "cross_attn.output_proj"))},
    patched=["one length"],
    patches={
        "attention": replace_attention,
        "post_input": model_patch("post_input", lambda given: {**given, "img": given["img"] * 1.5}),
        "attn1_patch": model_patch("attn1_patch", lambda q, k, v, **_: {"v": v * 1.5}),
        "attn2_patch": model_patch("attn2_patch", lambda q, k, v, **_: {"v": v * 1.5}),
        "mlp_patch": model_patch("mlp_patch", lambda given: {**given, "x": given["x"] * 1.5}),
    },
    sizes={FILE: Sizes(
        (Picture(1024, 1024, (1,)), Picture(1536, 768, (1,)), Picture(832, 1216, (1,))),
        "up to 2 in a batch, 512 to 1536 px, 512 tokens", "832x1216, 512 tokens",
        sampled={"B": 2, "R": 9, "C": 8},
    )},
    compiled=("one length",),
    slow={"test_whole_prompts_are_natives": (f"{FILE}, onnxruntime",)},
)  # fmt: skip
