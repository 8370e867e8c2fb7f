"""Qwen-Image 2.1 and its Turbo: a stand-in for native's network, see ``newer_networks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from family_contract import Call, Family, Prompt, Random, Sizes, drawing, model_patch
from hybrid_trt.architectures.shapes import Picture
from hybrid_trt.comfy_model.network import NativeNetwork
from tiny_transformers import QWEN_IMAGE21
from token_calls import replace_attention, replace_block

FILE, UNFUSED = "tiny_qwen_image21", "tiny_qwen_image21_unfused"
WIDTH, CHANNELS = QWEN_IMAGE21["prompt"], QWEN_IMAGE21["channels"]
Size = tuple[int, int]


def call(
    file: str = FILE, batch: int = 1, sides: Size = (8, 6), words: int = 9, references: tuple[Size, ...] = (),
    slots: list[int] | None = None, **more: Any,
) -> Call:  # fmt: skip
    """A call with references among its words, at slots."""

    def draw(network: NativeNetwork, seed: int) -> dict[str, Any]:
        random = drawing(seed)
        given = {"x": random(batch, CHANNELS, *sides), "timestep": random(batch).sigmoid(),
                 "context": random(batch, words, WIDTH)}  # fmt: skip
        if references:
            given["ref_latents"] = [random(batch, CHANNELS, *one) for one in references]
        return given | ({} if slots is None else {"image_slots": slots}) | more

    return Call(file, draw)


def references(*sides: Size, **more: Any) -> Callable[[Random], dict[str, Any]]:
    """Entries of a conditioning that refers to pictures."""
    return lambda random: more | {"reference_latents": [random(1, CHANNELS, *one) for one in sides]}


def prompt(file: str = FILE, shape: tuple[int, ...] = (1, CHANNELS, 8, 6), **options: Any) -> Prompt:
    return Prompt(file, WIDTH, shape, **options)


TWO = ((8, 6), (5, 9))

FAMILY = Family(
    "qwen_image21",
    calls={
        "plain": call(),
        "odd sides, a batch": call(batch=2, sides=(13, 11), words=30),
        "a prompt of one token": call(words=1),
        "one reference": call(references=((8, 6),)),
        "the same in front": call(references=((8, 6),), slots=[0]),
        "the same among the words": call(references=((8, 6),), slots=[4]),
        "two references, odd sides, a batch": call(batch=2, sides=(7, 10), words=77, references=TWO, slots=[3, 40]),
        "a slot for the first of two": call(references=TWO, slots=[2]),
        "two at one slot": call(references=TWO, slots=[2, 2]),
        "not fused": call(UNFUSED),
        "not fused, references": call(UNFUSED, sides=(5, 5), references=TWO, slots=[1, 9]),
    },
    unlike={"plain": ("one reference", "the same in front", "the same among the words")},
    half={name: [torch.bfloat16] for name in ("odd sides, a batch", "two references, odd sides, a batch")},
    float32=("timestep", "pe"),
    steady={"one reference": ("pe",)},
    ignored={"plain": [{"attention_mask": torch.ones(1, 9)}, {"ref_latents_method": "index"}, {"image_slots": [2]}]},
    refused={"plain": [
        ({"context": None}, "no prompt"),
        ({"context": torch.zeros(1, 0, WIDTH)}, "without words"),
        ({"x": torch.zeros(1, CHANNELS, 1, 8, 6)}, "several frames"),
        ({"ref_latents": [torch.zeros(1, CHANNELS, 1, 8, 6)]}, "several frames"),
        ({"ref_latents": [torch.zeros(2, CHANNELS, 8, 6)]}, "another batch"),
        ({"ref_latents": [torch.zeros(1, 16, 8, 6)]}, "kind of latent"),
        ({"ref_latents": [torch.zeros(1, CHANNELS, 8, 6)], "image_slots": [10]}, "outside the prompt"),
        ({"control": {"input": [torch.zeros(1)]}}, "control"),
        ({"of_another_pack": 1}, "of_another_pack"),
    ]},
    prompts={
        "two lengths": prompt(words=(9, 30), calls=6),
        "odd sides": prompt(shape=(1, CHANNELS, 13, 11), words=(9, 9)),
        "without CFG": prompt(words=(77, 1), cfg=1.0),
        "one length": prompt(),
        "a batch": prompt(shape=(2, CHANNELS, 8, 6), words=(9, 30), calls=6),
        "references": prompt(words=(9, 30), calls=6, entries=references(*TWO, image_slots=[2, 9])),
        "references of one length": prompt(entries=references(*TWO)),
        "not fused": prompt(UNFUSED, words=(9, 30), calls=6, entries=references((8, 6), image_slots=[0])),
    },
    loras={name: ("txt_in.in_layer", "transformer_blocks.0.attn.to_k", "transformer_blocks.1.img_mlp.gate_up")
           for name in ("one length", "references")},
    dynamic=["references"],
    patched=["one length"],
    patches={
        "dit replaced": lambda model: replace_block(model, "single_block"),
        "attention": replace_attention,
        "post_input": model_patch("post_input", lambda given: {**given, "img": given["img"] * 1.5}),
        "single_block": model_patch("single_block", lambda given: {**given, "img": given["img"] * 1.5}),
        "attn1_patch": model_patch("attn1_patch", lambda q, k, v, **_: {"q": q * 1.5}),
    },
    sizes={FILE: Sizes(
        (Picture(2048, 2048, (1,)), Picture(1664, 928, (1,)), Picture(928, 1664, (1,))),
        "up to 2 in a batch, 256 to 2048 px, 50176 tokens",
        "about 1248x1248, 30 tokens", more={"T": 30}, sampled={"B": 1, "N": 56},
    )},
    any_size={FILE: ("plain", "odd sides, a batch", "a prompt of one token", "two references, odd sides, a batch")},
    slow={"test_one_compiled_file_serves_calls_of_all_sizes": {FILE},
          "test_whole_prompts_are_natives": (f"{FILE}, onnxruntime",)},
    compiled=("one length",),
)  # fmt: skip
