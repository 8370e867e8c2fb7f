"""HunyuanVideo 1.5, HunyuanVideo and HunyuanImage 2.1."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from family_contract import Call, Family, Prompt, Random, Sizes, drawing, model_patch
from hybrid_trt.architectures.shapes import Picture
from hybrid_trt.comfy_model.network import NativeNetwork
from token_calls import replace_attention, replace_block

WIDTH, BYT5, SIGLIP, POOLED = 64, 1472, 1152, 768
"""Features of a token of the prompt, of text by byT5, of a picture, and of a pooled prompt."""
VIDEO15, SR, VIDEO = "tiny_hunyuan_video15", "tiny_hunyuan_video15_sr", "tiny_hunyuan_video"
IMAGE, REFINER = "tiny_hunyuan_image21", "tiny_hunyuan_image21_refiner"
CHANNELS = {VIDEO15: 65, SR: 98, VIDEO: 16, IMAGE: 64, REFINER: 128}
FIRST_GIVEN = (0.0, 1.0, 1.0)
Entries = Callable[[Random], dict[str, Any]]


def call(
    file: str = VIDEO15, batch: int = 1, size: tuple[int, ...] = (3, 5, 4), words: int = 9, glyphs: int = 0,
    seen: int = 0, sigma: int | None = 1, guidance: float = 6.0,
    **more: Any,
) -> Call:  # fmt: skip
    """A call with tokens of the prompt, by byT5 and of a picture, on a latent of some frames and sides.

    ``sigma`` is an index in the sampler's list; None is one that is not in it.
    """

    def draw(_network: NativeNetwork, seed: int) -> dict[str, Any]:
        random, every = drawing(seed), torch.tensor([1.0, 0.8, 0.5, 0.0])
        now = torch.tensor(0.77) if sigma is None else every[sigma]
        found = {"x": random(batch, CHANNELS[file], *size), "timestep": 1000 * now.repeat(batch),
                 "context": random(batch, words, WIDTH), "y": random(batch, POOLED),
                 "guidance": torch.full((batch,), guidance),
                 "transformer_options": {"sigmas": now.reshape(1), "sample_sigmas": every}}  # fmt: skip
        if glyphs:
            found["txt_byt5"] = random(batch, glyphs, BYT5)
        if seen:
            found["clip_fea"] = random(batch, seen, SIGLIP)
        return found | more

    return Call(file, draw)


def prompt(file: str = VIDEO15, shape: tuple[int, ...] = (1, 32, 3, 5, 4), *entries: Entries, **options: Any) -> Prompt:
    return Prompt(file, WIDTH, shape, pooled=POOLED, entries=lambda random: {
        name: value for one in entries for name, value in one(random).items()}, **options)  # fmt: skip


def picture(random: Random) -> dict[str, Any]:
    """Entries of a picture to begin with, as ComfyUI's node for image to video makes them."""
    mask = torch.ones(1, 1, 3, 5, 4)
    mask[:, :, :1] = 0
    return {"concat_latent_image": random(1, 32, 3, 5, 4), "concat_mask": mask,
            "clip_vision_output": SimpleNamespace(last_hidden_state=random(1, 729, SIGLIP))}  # fmt: skip


def glyphs(count: int) -> Entries:
    """Entries of text by byT5."""
    return lambda random: {"conditioning_byt5small": random(1, count, BYT5)}


OWN, ORIGINAL = (VIDEO15, (1, 32, 3, 5, 4)), (VIDEO, (1, 16, 3, 8, 6))
LORA = ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.0", "single_blocks.0.linear1",
        "txt_in.individual_token_refiner.blocks.0.self_attn.proj")  # fmt: skip
PATCHES = {
    "dit replaced": replace_block,
    "dit replaced (single block)": lambda model: replace_block(model, "single_block"),
    "attention": replace_attention,
    "attn1_patch": model_patch("attn1_patch", lambda q, k, v, **more: {"q": q * 1.5}),
    "attn1_output_patch": model_patch("attn1_output_patch", lambda x, more: x * 1.5),
}
VIDEO_WORDS = "up to 2 in a batch, 256 to 1280 px, 1024 tokens, up to 129 frames"

FAMILY = Family(
    "hunyuan_video",
    calls={
        "one frame": call(size=(1, 5, 4)),
        "several frames, a batch": call(batch=2, size=(4, 3, 7)),
        "a prompt of one token": call(words=1),
        "a long prompt": call(words=128),
        "text by byT5": call(glyphs=13),
        "a picture": call(batch=2, seen=25),
        "a picture and text by byT5": call(glyphs=7, seen=31, words=20),
        "meanflow": call(SR, 2, glyphs=5, seen=12),
        "meanflow that is not wanted": call(SR, 2, glyphs=5, seen=12, disable_time_r=True),
        "meanflow, a sigma of no list": call(SR, sigma=None),
        "original": call(VIDEO, size=(3, 8, 6)),
        "original, a batch with another guidance": call(VIDEO, 2, (2, 4, 10), 30, guidance=2.5),
        "a still picture": call(IMAGE, 2, (7, 5), 12),
        "a still picture, text by byT5": call(IMAGE, 1, (4, 6), 21, 17),
        "refiner": call(REFINER, 1, (2, 4, 5)),
    },
    unlike={"meanflow": ("meanflow that is not wanted",)},
    half={name: [torch.bfloat16, torch.float16] for name in (
        "a picture and text by byT5", "meanflow", "a still picture, text by byT5")},
    steady={"one frame": ("pe",)},
    refused={
        "one frame": [
            ({"context": None}, "no prompt"),
            ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, "attention_mask"),
            ({"ref_latent": torch.zeros(1, 65, 1, 5, 4)}, "ref_latent"),
            ({"guiding_frame_index": torch.zeros(1)}, "guiding_frame_index"),
            ({"control": {"input": [torch.zeros(1)]}}, "control"),
            ({"of_another_pack": 1}, "of_another_pack"),
        ],
        "original": [
            ({"y": None}, "no pooled prompt"),
            ({"guidance": None}, "no guidance"),
            ({"clip_fea": torch.zeros(1, 25, SIGLIP)}, "a picture by CLIP"),
            ({"x": torch.zeros(1, 16, 3, 7, 6)}, "odd sides"),
        ],
        "meanflow": [({"transformer_options": {}}, "does not tell its list of steps")],
    },
    ignored={"original": [
        {"txt_byt5": torch.zeros(1, 5, BYT5)}, {"disable_time_r": True}, {"denoise_mask": torch.zeros(1)}]},
    prompts={
        "text to video": prompt(),
        "prompts of two lengths": prompt(words=(9, 30), calls=6),
        "text by byT5": prompt(*OWN, glyphs(13)),
        "a picture": prompt(*OWN, picture),
        "a picture and text by byT5, no CFG": prompt(*OWN, picture, glyphs(8), cfg=1.0),
        "two videos": prompt(VIDEO15, (2, 32, 2, 4, 6)),
        "distilled": prompt(SR, (1, 32, 3, 5, 4), lambda random: {"concat_latent_image": random(1, 66, 3, 5, 4)},
                            cfg=1.0),
        "original": prompt(*ORIGINAL),
        "original, another guidance": prompt(*ORIGINAL, lambda random: {"guidance": 2.0}, cfg=1.0),
        "original, the first frame given": prompt(*ORIGINAL, mask=FIRST_GIVEN),
        "a still picture": prompt(IMAGE, (1, 64, 5, 7)),
        "a still picture, text by byT5": prompt(IMAGE, (2, 64, 5, 7), glyphs(5)),
        "refiner": prompt(REFINER, (1, 64, 2, 5, 4), lambda random: {
            "concat_latent_image": random(1, 32, 3, 5, 4), "noise_augmentation": 0.1}),
    },
    native={
        "a mask of the prompt": prompt(*OWN, lambda random: {
            "attention_mask": torch.tensor([[1] * 10 + [0] * 2])}, words=(12, 14), cfg=1.0),
        "a frame of its own time": prompt(*ORIGINAL, lambda random: {"guiding_frame_index": 0}, mask=FIRST_GIVEN),
    },
    loras=dict.fromkeys(("text to video", "text by byT5", "a picture", "original", "a still picture, text by byT5"),
                        LORA),
    dynamic=["text by byT5"],
    patched=["text to video"],
    patches=PATCHES,
    sizes={
        VIDEO15: Sizes((Picture(848, 480, (1,), length=121),), VIDEO_WORDS, "848x480, 128 tokens, 121 frames",
                       sampled={"B": 1, "F": 21, "R": 8, "C": 7}, length=81),
        VIDEO: Sizes((Picture(848, 480, (1,), length=73),), VIDEO_WORDS, "848x480, 128 tokens, 73 frames",
                     sampled={"B": 1, "F": 21, "R": 9, "C": 8}, length=81),
        IMAGE: Sizes((Picture(2048, 2048, (1,)),), "up to 2 in a batch, 512 to 2560 px, 1024 tokens",
                     "2048x2048, 128 tokens"),
    },
    compiled=("text by byT5", "text to video", "a picture", "original", "a still picture, text by byT5"),
    slow={
        "test_one_engine_of_onnx_runtime_serves_all_calls": (SR, VIDEO, IMAGE, REFINER),
        "test_whole_prompts_are_natives": [f"{file}, onnxruntime" for file in CHANNELS],
    },
)  # fmt: skip
