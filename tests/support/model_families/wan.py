"""Wan 2.1 and 2.2: text and pictures to video, 5B and VACE."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from family_contract import Call, Family, Prompt, Random, Sizes, drawing, model_patch
from hybrid_trt.architectures.shapes import Picture
from hybrid_trt.comfy_model.network import NativeNetwork
from token_calls import replace_attention, replace_block

WIDTH, CLIP = 4096, 1280
"""Features of a token of the prompt, and of CLIP."""
FRAMES = (3, 8, 6)
"""Frames and sides of a latent."""


def call(
    file: str = "tiny_wan", batch: int = 1, size: tuple[int, int, int] = FRAMES, words: int = 9, channels: int = 16,
    clip: int = 0, behind: int = 0, controls: tuple[float, ...] = (), apart: bool = False,
    **more: Any,
) -> Call:  # fmt: skip
    """A call with a prompt and a picture of so many tokens, on a latent of so many frames and sides.

    ``behind`` is the number of frames of latents behind the video's, ``controls`` the strengths of control videos.
    Frames that are ``apart`` have each a timestep.
    """

    def draw(_network: NativeNetwork, seed: int) -> dict[str, Any]:
        random = drawing(seed)
        times = random(batch, size[0]) if apart else random(batch)
        found = {"x": random(batch, channels, *size), "context": random(batch, words, WIDTH),
                 "timestep": 999 * times.sigmoid()}  # fmt: skip
        if clip:
            found["clip_fea"] = random(batch, clip, CLIP)
        if behind:
            found["time_dim_concat"] = random(batch, channels, behind, *size[1:])
        if controls:
            found |= {"vace_context": random(batch, len(controls), 96, *size), "vace_strength": list(controls)}
        return found | more

    return Call(file, draw)


def prompt(file: str = "tiny_wan", channels: int = 16, size: tuple[int, int, int] = FRAMES, batch: int = 1,
           **options: Any) -> Prompt:  # fmt: skip
    return Prompt(file, WIDTH, (batch, channels, *size), **options)


def picture(clip: int = 0) -> Callable[[Random], dict[str, Any]]:
    """Entries of a picture to begin with, as ComfyUI's nodes for image to video make them."""

    def entries(random: Random) -> dict[str, Any]:
        mask = torch.ones(1, 1, *FRAMES)
        mask[:, :, :1] = 0
        seen = {"clip_vision_output": SimpleNamespace(penultimate_hidden_states=random(1, clip, CLIP))} if clip else {}
        return {"concat_latent_image": random(1, 16, *FRAMES), "concat_mask": mask, **seen}

    return entries


def controlled(*strengths: float) -> Callable[[Random], dict[str, Any]]:
    """Entries of control videos, as ComfyUI's node for VACE makes them."""
    return lambda random: {"vace_frames": [random(1, 32, *FRAMES) for _ in strengths],
                           "vace_mask": [random(1, 64, *FRAMES) for _ in strengths],
                           "vace_strength": list(strengths)}  # fmt: skip


LORA = tuple(f"blocks.{i}.{layer}" for i in range(2) for layer in ("self_attn.q", "cross_attn.v", "ffn.0"))
USED_FOR = "up to 2 in a batch, 256 to 1280 px, 512 tokens, up to 129 frames"
PATCHES = {
    "dit replaced": replace_block,
    "attention": replace_attention,
    "attn1_patch": model_patch("attn1_patch", lambda given: given["x"] * 1.5),
    "attn2_patch": model_patch("attn2_patch", lambda given: given["x"] * 1.5),
    "double_block": model_patch("double_block", lambda given: {"img": given["img"] * 1.5}),
}

FAMILY = Family(
    "wan",
    calls={
        "one frame": call(size=(1, 8, 6)),
        "several frames": call(),
        "more frames": call(size=(5, 7, 6)),
        "odd sides, a batch": call(batch=2, size=(2, 13, 11), words=30),
        "a prompt of one token": call(words=1),
        "a long prompt": call(words=128),
        "references behind the video": call(behind=2),
        "places moved by another node": call(transformer_options={"rope_options": {"scale_x": 0.5, "shift_t": 3.0}}),
        "a picture": call("tiny_wan_i2v", 2, (3, 7, 8), 12, 36, 257),
        "first and last picture": call("tiny_wan_flf2v", channels=36, clip=514),
        "first picture of such a network": call("tiny_wan_flf2v", channels=36, clip=257),
        "2.2's picture": call("tiny_wan22_i2v", 2, channels=36),
        "5B": call("tiny_wan22_5b", channels=48),
        "5B, timesteps per frame": call("tiny_wan22_5b", 2, (4, 5, 6), 20, 48, apart=True),
        "a control video": call("tiny_wan_vace", controls=(1.0,)),
        "two control videos, a batch": call("tiny_wan_vace", 2, (2, 6, 10), 20, controls=(0.4, 1.3)),
    },
    unlike={"several frames": ("places moved by another node",)},
    half={name: [torch.bfloat16] for name in (
        "several frames", "a picture", "5B, timesteps per frame", "two control videos, a batch")},
    steady={"several frames": ("pe",)},
    refused={
        "several frames": [
            ({"context": None}, "no prompt"),
            ({"context_latents": [torch.zeros(1, 16, 1, 8, 6)]}, "context_latents"),
            ({"control": {"input": [torch.zeros(1)]}}, "control"),
            ({"vace_context": torch.zeros(1)}, "vace_context"),
            ({"of_another_pack": 1}, "of_another_pack"),
            ({"timestep": torch.zeros(1, 2)}, "noise of its own for parts"),
        ],
        "a control video": [
            ({"timestep": torch.zeros(1, 3)}, "noise of its own for parts"),
            ({"vace_context": torch.zeros(1, 1, 96, 3, 7, 6)}, "odd sides"),
            ({"vace_strength": []}, "without a strength"),
        ],
        "a picture": [({"clip_fea": None}, "no picture by CLIP")],
        "first and last picture": [({"clip_fea": torch.zeros(1, 771, CLIP)}, "more pictures by CLIP")],
    },
    ignored={"several frames": [
        {"reference_latent": torch.zeros(1, 16, 8, 6)}, {"clip_fea": torch.zeros(1, 257, CLIP)},
        {"denoise_mask": torch.zeros(1, 1, 3, 8, 6)}]},
    prompts={
        "text to video": prompt(),
        "one frame, odd sides": prompt(size=(1, 13, 11)),
        "prompts of two lengths": prompt(words=(9, 30), calls=6),
        "two videos without CFG": prompt(batch=2, cfg=1.0),
        "references behind the video": prompt(entries=lambda random: {"time_dim_concat": random(1, 16, 2, 8, 6)}),
        "a picture": prompt("tiny_wan_i2v", entries=picture(257)),
        "first and last picture": prompt("tiny_wan_flf2v", entries=picture(514)),
        "2.2's picture": prompt("tiny_wan22_i2v", entries=picture()),
        "5B": prompt("tiny_wan22_5b", 48),
        "5B, the first frame given": prompt("tiny_wan22_5b", 48, mask=(0.0, 1.0, 1.0)),
        "a control video": prompt("tiny_wan_vace", entries=controlled(0.8)),
        "two control videos": prompt("tiny_wan_vace", entries=controlled(0.8, 1.4)),
        "VACE without control": prompt("tiny_wan_vace"),
    },
    native={
        "no picture by CLIP": prompt("tiny_wan_i2v", entries=picture()),
        "references in context": prompt(entries=lambda random: {"context_latents": [random(1, 16, 1, 8, 6)]}),
    },
    loras=dict.fromkeys(("text to video", "a picture", "a control video", "two control videos"), LORA),
    patched=["text to video", "a control video"],
    patches=PATCHES,
    sizes={
        "tiny_wan": Sizes((Picture(832, 480, (1,), length=81),), USED_FOR, "832x480, 512 tokens, 81 frames",
                          sampled={"B": 2, "F": 21, "R": 9, "C": 8}, length=81),
        "tiny_wan22_5b": Sizes((Picture(1280, 704, (1,), length=121),), USED_FOR,
                               "1280x704, 512 tokens, 121 frames",
                               sampled={"B": 2, "F": 21, "R": 4, "C": 4}, length=81),
    },
    compiled=("text to video", "a picture", "two control videos"),
    slow={
        "test_one_engine_of_onnx_runtime_serves_all_calls": (
            "tiny_wan_i2v", "tiny_wan_flf2v", "tiny_wan22_i2v", "tiny_wan22_5b"),
        "test_whole_prompts_are_natives": [f"{file}, onnxruntime" for file in (
            "tiny_wan_i2v", "tiny_wan_flf2v", "tiny_wan22_i2v", "tiny_wan_vace")],
    },
)  # fmt: skip
