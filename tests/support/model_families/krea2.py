"""Krea 2."""

from __future__ import annotations

import torch
from family_contract import Family, Prompt, Sizes, model_patch
from hybrid_trt.architectures.shapes import Picture
from tiny_transformers import KREA2
from token_calls import Call, replace_attention

from .token_data import calls_of, prompts_of, references

FILE, WIDTH = "tiny_krea2", KREA2["txtlayers"] * KREA2["txtdim"]
SIDES = (8, 8), (5, 9), (7, 3)

FAMILY = Family(
    "krea2",
    calls=calls_of(FILE, WIDTH, {
        "plain": Call(),
        "odd sides, a batch": Call(2, (13, 11), 30),
        "a prompt of one token": Call(words=1),
        "a latent without a row of pictures": Call(2, (13, 11), more={"x": torch.ones(2, 16, 13, 11)}),
        "one reference": Call(references=((8, 6),), method="index"),
        "one reference for a whole batch": Call(2, method="index", more={"ref_latents": [torch.ones(1, 16, 1, 8, 6)]}),
        "two references, odd sides, a batch": Call(2, (13, 11), 77, ((8, 8), (5, 9)), "index"),
        "references of time zero": Call(2, (8, 8), 7, SIDES, "index_timestep_zero"),
        "the same by index": Call(2, (8, 8), 7, SIDES, "index"),
        "the same without references": Call(2, (8, 8), 7),
        "references that native passes over": Call(1, (8, 8), 7, ((8, 8), (9, 9))),
    }),
    unlike={"references of time zero": ("the same by index", "the same without references")},
    half={"odd sides, a batch": [torch.float16, torch.bfloat16]},
    float32=("timestep", "reference_timestep", "pe_image", "pe_reference"),
    steady={"one reference": ("pe_image", "pe_reference")},
    refused={"plain": [
        ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several frames"),
        ({"ref_latents": [torch.zeros(1, 16, 2, 8, 6)], "ref_latents_method": "index"}, "several frames"),
        ({"context": None}, "no prompt"),
        ({"control": {"input": [torch.zeros(1)]}}, "control"),
        ({"of_another_pack": 1}, "of_another_pack"),
    ]},
    prompts=prompts_of(FILE, WIDTH) | {
        "references": Prompt(FILE, WIDTH, words=(9, 30), calls=6, entries=references((8, 6), (5, 9), method="index")),
        "a reference of time zero": Prompt(
            FILE, WIDTH, words=(9, 30), calls=6, entries=references((8, 6), method="index_timestep_zero")),
    },
    loras={"one length": ("blocks.0.attn.wq", "blocks.1.mlp.up")},
    patched=["one length"],
    patches={
        "attention": replace_attention,
        "post_input": model_patch("post_input", lambda given: {**given, "img": given["img"] * 1.5}),
        "attn1_patch": model_patch("attn1_patch", lambda q, k, v, **_: {"q": q * 1.5}),
        "attn1_output_patch": model_patch("attn1_output_patch", lambda out, _options: out * 1.5),
    },
    sizes={FILE: Sizes(
        (Picture(1024, 1024, (1,)), Picture(1536, 768, (1,)), Picture(832, 1216, (1,))),
        "up to 2 in a batch, 256 to 1536 px, 1024 tokens", "832x1216, 64 tokens",
    )},
    slow={"test_whole_prompts_are_natives": (f"{FILE}, onnxruntime",)},
)  # fmt: skip
