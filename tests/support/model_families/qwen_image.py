"""Qwen-Image and its Edit models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from family_contract import Call, Family, Prompt, Sizes, drawing, model_patch
from hybrid_trt.architectures.shapes import Picture
from hybrid_trt.comfy_model.network import NativeNetwork
from tiny_transformers import QWEN_IMAGE
from token_calls import Call as TokenCall
from token_calls import replace_attention, replace_block

from .token_data import calls_of, prompts_of, references

FILE, WIDTH, FEATURES = "tiny_qwen_image", QWEN_IMAGE["joint_attention_dim"], 64
SIDES = (8, 8), (5, 9), (7, 3)
PLAIN = calls_of(FILE, WIDTH, {
    "plain": TokenCall(),
    "odd sides, a batch": TokenCall(2, (13, 11), 30),
    "a prompt of one token": TokenCall(words=1),
    "one reference": TokenCall(references=((8, 6),), method="index"),
    "two references, odd sides, a batch": TokenCall(2, (13, 11), 77, ((8, 8), (5, 9)), "index"),
    "references of time zero": TokenCall(2, (8, 8), 7, SIDES, "index_timestep_zero"),
    "the same by index": TokenCall(2, (8, 8), 7, SIDES, "index"),
    "the same beside each other": TokenCall(2, (8, 8), 7, SIDES, "uxo"),
    "the same of negative index": TokenCall(2, (8, 8), 7, SIDES, "negative_index"),
    "the same without references": TokenCall(2, (8, 8), 7),
    "references beside each other": TokenCall(1, (8, 9), 7, ((8, 8), (9, 9), (7, 13)), "uxo"),
    "references of negative index": TokenCall(1, (8, 8), 7, ((8, 8), (9, 9)), "negative_index"),
    "the model's own way to place them": TokenCall(1, (8, 8), 7, ((8, 8), (9, 9))),
})  # fmt: skip


def with_residuals(call: Call, full: bool) -> Call:
    """A call with two blocks' residuals, or one of the two; made once for the whole batch."""

    def draw(network: NativeNetwork, seed: int) -> dict[str, Any]:
        given, random = call.draw(network, seed), drawing(seed)
        rows, columns = (-(-side // 2) for side in given["x"].shape[-2:])
        own = [3 * random(1, rows * columns, FEATURES) for _ in range(2)]
        return given | {"control": {"input": own if full else [None, own[1]], "output": [], "middle": []}}

    return replace(call, draw=draw)


CALLS = PLAIN | {f"{name}, with residuals": with_residuals(call, True) for name, call in PLAIN.items()} | {
    f"{name}, with one residual": with_residuals(call, False) for name, call in PLAIN.items()}  # fmt: skip

FAMILY = Family(
    "qwen_image",
    calls=CALLS,
    unlike={name: (f"{name}, with residuals", f"{name}, with one residual") for name in PLAIN} | {
        "references of time zero": tuple(name for name in PLAIN if name.startswith("the same "))},
    half={"odd sides, a batch": [torch.float16, torch.bfloat16]},
    float32=("timestep", "reference_timestep"),
    steady={"one reference": ("pe_image", "pe_context", "pe_reference")},
    refused={"plain": [
        ({"attention_mask": torch.ones(1, 9)}, "attention_mask"),
        ({"additional_t_cond": torch.zeros(1)}, "additional_t_cond"),
        ({"x": torch.zeros(1, 16, 3, 8, 6)}, "several frames"),
        ({"ref_latents": [torch.zeros(1, 16, 2, 8, 6)]}, "several frames"),
        ({"ref_latents": [torch.zeros(2, 16, 1, 8, 6)]}, "another batch"),
        ({"context": None}, "no prompt"),
        ({"of_another_pack": 1}, "of_another_pack"),
    ]},
    prompts=prompts_of(FILE, WIDTH) | {
        "references": Prompt(FILE, WIDTH, words=(9, 30), calls=6, entries=references((8, 6), (5, 9))),
        "a reference of time zero": Prompt(
            FILE, WIDTH, words=(9, 30), calls=6, entries=references((8, 6), method="index_timestep_zero")),
    },
    native={"a mask of the prompt": Prompt(FILE, WIDTH, words=(9, 9), entries=lambda random: {
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 0]])})},
    loras={"one length": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_v_proj")},
    patched=["one length"],
    patches={
        "dit replaced": replace_block,
        "attention": replace_attention,
        "post_input": model_patch("post_input", lambda given: {**given, "img": given["img"] * 1.5}),
        "double_block": model_patch("double_block", lambda given: {**given, "img": given["img"] * 1.5}),
        "attn1_patch": model_patch("attn1_patch", lambda q, k, v, **_: {"q": q * 1.5}),
    },
    sizes={FILE: Sizes(
        (Picture(1328, 1328, (1,)), Picture(1664, 928, (1,)), Picture(928, 1664, (1,))),
        "up to 2 in a batch, 256 to 1664 px, 1024 tokens", "928x1664, 30 tokens, 7 reference tokens",
        more={"T": 30, "L": 7}, sampled={"B": 1, "R": 9, "C": 8, "L": 0},
    )},
)  # fmt: skip
