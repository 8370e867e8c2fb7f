"""MiniMax H3: text, first and last frames, and references to video with sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from family_contract import Call, Family, Prompt, Random, Sizes, drawing
from hybrid_trt.architectures.shapes import Picture
from hybrid_trt.comfy_model.network import NativeNetwork
from token_calls import replace_attention, replace_block

FILE, PRUNED, WIDTH = "tiny_minimax_h3", "tiny_minimax_h3_pruned", 64
Video = tuple[int, int, int]
"""Frames and sides of a latent."""
Entries = Callable[[Random], dict[str, Any]]


def frames(size: Video, first: bool = True, last: bool = True) -> Entries:
    """Entries of frames to begin and end with, as ComfyUI's node makes them."""
    count = (size[0] - 2) // 5 * 17 + 5
    places = [0] * first + [count - 1] * last
    return lambda random: {"minimax_frame_count": count, "minimax_keyframes": [
        {"resolved_frame_index": place, "latent": random(1, 24, 1, *size[1:])} for place in places]}  # fmt: skip


def references(random: Random) -> dict[str, Any]:
    """Entries that refer to a picture, a video with its sound, a silent video and a sound."""
    found = [{"kind": "image", "latent_h": 4, "latent_w": 6, "latent": random(1, 24, 1, 4, 6)}]
    for kind, steps in (("video_audio", 3), ("video", 0)):
        found.append({"kind": kind, "latent_h": 6, "latent_w": 4, "latent_t": 2, "latent": random(1, 24, 2, 6, 4),
                      "ref_audio_t": steps, "audio_latent": random(1, 32, 2, steps) if steps else None})  # fmt: skip
    found.append({"kind": "audio", "ref_audio_t": 4, "audio_latent": random(1, 32, 2, 4)})
    return {"minimax_refs": found}


def tags(words: int) -> Entries:
    """The entry of a prompt in which pictures stand among the words."""
    return lambda _: {"minimax_token_tags": torch.tensor([[1, 0, 0] * words])[:, :words]}


def call(
    file: str = FILE, size: Video = (2, 8, 6), words: int = 9, sound: int = 8, entries: Entries = lambda _: {},
    **more: Any,
) -> Call:  # fmt: skip
    """A call as ComfyUI makes it of a conditioning with these entries."""

    def draw(network: NativeNetwork, seed: int) -> dict[str, Any]:
        random = drawing(seed)
        x = [random(1, 24, *size), random(1, 32, 2, sound)]
        with torch.inference_mode():
            made = network.patcher.model.extra_conds(
                device=torch.device("cpu"), noise=x[0], cross_attn=random(1, words, WIDTH), seed=3,
                latent_shapes=[t.shape for t in x], **entries(random))  # fmt: skip
        return {"x": x, "timestep": 999 * random(1).sigmoid(), "context": made["c_crossattn"].cond,
                "minimax_payload": made["minimax_payload"].cond, **more}  # fmt: skip

    return Call(file, draw)


def prompt(file: str = FILE, size: Video = (2, 8, 6), sound: int = 8, **options: Any) -> Prompt:
    return Prompt(file, WIDTH, (1, 24, *size), sound=(1, 32, 2, sound), **{"calls": 6, **options})


SHIFTS = {"minimax_h3_sigma_shift_video": 5.0, "minimax_h3_sigma_shift_audio": 2.0}

FAMILY = Family(
    "minimax_h3",
    calls={
        "text": call(),
        "odd sides, a long prompt": call(size=(7, 5, 9), words=120, sound=25),
        "one word, a short sound": call(words=1, sound=1),
        "pictures among the words": call(entries=tags(9)),
        "first and last frame": call(size=(7, 8, 6), sound=20, entries=frames((7, 8, 6))),
        "last frame": call(entries=frames((2, 8, 6), first=False)),
        "references": call(entries=lambda random: references(random) | tags(9)(random)),
        "references without noise": call(entries=lambda random: {
            **references(random), "minimax_visual_cond_noise_aug": 1.0, "minimax_audio_cond_noise_aug": 0.9}),
        "other schedules": call(transformer_options=SHIFTS),
        "pruned": call(PRUNED),
        "pruned, references": call(PRUNED, (7, 5, 9), 30, 22, references),
        "pruned, first frame": call(PRUNED, entries=frames((2, 8, 6), last=False)),
    },
    unlike={"text": ("pictures among the words", "last frame", "references", "other schedules"),
            "references": ("references without noise",)},
    half={name: [torch.bfloat16] for name in ("text", "references", "pruned, references")},
    float32=("kinds", "condition", "is_sound", "sound", "video", "times"),
    refused={"text": [
        ({"context": None}, "no prompt"),
        ({"context": torch.zeros(1, 9, WIDTH)}, "did not refine"),
        ({"x": torch.zeros(1, 24, 2, 8, 6)}, "one video with its sound"),
        ({"x": [torch.zeros(2, 24, 2, 8, 6), torch.zeros(2, 32, 2, 8)]}, "one video with its sound"),
        ({"minimax_payload": None}, "another size than ComfyUI prepared"),
        ({"context": torch.zeros(1, 10, 256)}, "another size"),
        ({"denoise_mask": torch.zeros(1, 1, 2, 8, 6)}, "denoise_mask"),
        ({"control": {"input": [torch.zeros(1)]}}, "control"),
        ({"of_another_pack": 1}, "of_another_pack"),
    ]},
    prompts={
        "text": prompt(),
        "two lengths, odd sides": prompt(size=(7, 5, 9), sound=20, words=(9, 30)),
        "without CFG": prompt(cfg=1.0, calls=3),
        "first and last frame": prompt(size=(7, 8, 6), sound=20, entries=frames((7, 8, 6))),
        "references": prompt(entries=references),
        "pruned": prompt(PRUNED, words=(30, 9)),
    },
    loras={"text": ("blocks.0.attn.qkv_proj", "blocks.1.mlp.fc2")},
    patched=["text"],
    patches={"dit replaced": replace_block, "attention": replace_attention},
    sizes={FILE: Sizes(
        (Picture(1344, 768, (1,), length=124), Picture(832, 480, (1,), length=362)),
        "256 to 1344 px, 1024 tokens, up to 362 frames", "832x480, 512 tokens, 362 frames",
        sampled={"F": 37, "A": 207}, length=124,
    )},
    compiled=("text",),
    slow={"test_whole_prompts_are_natives": (f"{FILE}, onnxruntime",)},
)  # fmt: skip
