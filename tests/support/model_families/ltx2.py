"""LTX-2.0, 2.3 and 2.5: text, frames and guides to video with sound."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from comfy.ldm.lightricks.av_model import LTXAVModel
from comfy.model_patcher import ModelPatcher
from family_contract import Call, Family, Prompt, Random, Sizes, drawing
from hybrid_trt.architectures.shapes import Picture
from hybrid_trt.comfy_model.network import NativeNetwork
from token_calls import replace_attention, uneven

FILE, TURNED, LTX23, LTX25, WIDTH = "tiny_ltx2", "tiny_ltx2_interleaved", "tiny_ltx23", "tiny_ltx25", 96
KNOWS_25 = "ff_bias" in inspect.signature(LTXAVModel.__init__).parameters
"""True for versions of ComfyUI that know LTX-2.5; an older one loads it with missing weights."""
Video = tuple[int, int, int]
"""Frames and sides of a latent."""
Entries = Callable[[Random, Video], dict[str, Any]]


def first_frame(_random: Random, size: Video) -> dict[str, Any]:
    """A mask of a first frame that is given, and of a sound of which a part is."""
    mask, sound = torch.ones(1, 1, *size), torch.ones(1, 1, 5, 1)
    mask[:, :, 0], sound[:, :, :2] = 0.25, 0.5
    return {"denoise_mask": mask, "audio_denoise_mask": sound}


def inside(_random: Random, size: Video) -> dict[str, Any]:
    """A mask that is not the same for all of a frame."""
    mask = torch.ones(1, 1, *size)
    mask[:, :, 1, : size[1] // 2] = 0.5
    return {"denoise_mask": mask}


def guides(strength: float = 1.0, dropped: int = 0) -> Entries:
    """The last frame as a guide, with a mask that drops so many of its rows."""

    def made(random: Random, size: Video) -> dict[str, Any]:
        tokens, mask = size[1] * size[2], torch.ones(1, 1, *size)
        mask[:, :, -1] = 0.0
        mask[:, :, -1, :dropped] = -1.0
        start = random(1, 3, tokens).abs() * 20
        return {"denoise_mask": mask, "keyframe_idxs": torch.stack([start, start + 8], -1),
                "guide_attention_entries": [{
                    "pre_filter_count": tokens, "strength": strength, "pixel_mask": None,
                    "latent_shape": (1, *size[1:])}]}  # fmt: skip

    return made


def reference(random: Random, _size: Video) -> dict[str, Any]:
    """Sound to refer to."""
    return {"ref_audio": {"tokens": random(1, 3, 128)}}


def replace_video(model: ModelPatcher) -> None:
    """Have the first block change its video."""

    def changed(given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        video, sound = more["original_block"](given)["img"]
        return {"img": (uneven(video), sound)}

    model.set_model_patch_replace(changed, "dit", "double_block", 0)


def call(
    file: str = FILE, batch: int = 1, size: Video = (3, 4, 5), words: int = 9, sound: int = 5,
    entries: Entries = lambda random, size: {}, **more: Any,
) -> Call:  # fmt: skip
    """A call as ComfyUI makes it of a latent and a mask."""

    def draw(network: NativeNetwork, seed: int) -> dict[str, Any]:
        random = drawing(seed)
        x = [random(batch, 128, *size), random(batch, 8, sound, 16)]
        found = {"x": x, "context": random(batch, words, WIDTH), "frame_rate": 24.0, **entries(random, size)}
        masks = {name: value for name, value in found.items() if name.endswith("denoise_mask")}
        time = network.patcher.model.process_timestep(random(batch).sigmoid(), x=x, **masks)
        return {**found, "timestep": time, **more}

    return Call(file, draw)


def prompt(file: str = FILE, size: Video = (3, 4, 5), sound: int = 5, **options: Any) -> Prompt:
    return Prompt(file, WIDTH, (1, 128, *size), sound=(1, 8, sound, 16), **options)


FAMILY = Family(
    "ltx2",
    calls={
        "text": call(),
        "a batch, one word, a short sound": call(batch=2, size=(1, 3, 3), words=1, sound=1),
        "first frame": call(size=(3, 5, 4), entries=first_frame),
        "a part of a frame": call(batch=2, size=(2, 5, 4), entries=inside),
        "a guide": call(entries=guides()),
        "a weighted guide": call(entries=guides(0.7)),
        "a guide without some rows": call(entries=guides(1.5, dropped=2)),
        "a reference of sound": call(batch=2, entries=reference),
        "neighbouring features": call(TURNED, 2, (2, 5, 3)),
        "2.3": call(LTX23, 2, words=30),
        "2.3, a weighted guide": call(LTX23, entries=guides(0.7, dropped=1)),
        "2.3, first frame and reference": call(LTX23, entries=lambda random, size: {
            **reference(random, size), "denoise_mask": first_frame(random, size)["denoise_mask"]}),
    } | ({
        "2.5": call(LTX25, 2, words=30),
        "2.5, a guide without some rows": call(LTX25, entries=guides(0.7, dropped=2)),
        "2.5, first frame": call(LTX25, size=(1, 5, 4), entries=first_frame),
    } if KNOWS_25 else {}),
    unlike={"text": ("a guide", "a weighted guide")},
    half={name: [torch.bfloat16] for name in (
        "text", "first frame", "a weighted guide", "2.3", "neighbouring features")},
    float32=("times", "sound_times", "clocks", "sound_clocks"),
    refused={"text": [
        ({"context": None}, "no prompt"),
        ({"context": torch.zeros(1, 9, 48)}, "did not prepare"),
        ({"x": torch.zeros(1, 128, 3, 4, 5)}, "without sound"),
        ({"attention_mask": torch.ones(1, 9)}, "attention_mask"),
        ({"transformer_options": {"a2v_cross_attn": False}}, "a2v_cross_attn"),
        ({"control": {"input": [torch.zeros(1)]}}, "control"),
        ({"of_another_pack": 1}, "of_another_pack"),
    ]},
    prompts={
        "text": prompt(),
        "two lengths": prompt(size=(2, 5, 3), words=(9, 30), calls=6),
        "without CFG": prompt(cfg=1.0),
        "a reference of sound": prompt(entries=lambda random: reference(random, (3, 4, 5))),
        "neighbouring features": prompt(TURNED),
        "2.3": prompt(LTX23, words=(30, 30)),
    } | ({"2.5": prompt(LTX25, words=(30, 30))} if KNOWS_25 else {}),
    loras={"text": ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.audio_ff.net.2")},
    patched=["text"],
    patches={"dit replaced": replace_video, "attention": replace_attention},
    sizes={FILE: Sizes(
        (Picture(1280, 704, (1,), length=121),), "1 image, 1024 tokens",
        "14080 tokens of video with 4.8 s of sound, 1024 tokens", sampled={"N": 132, "A": 81}, length=81,
    )},
    slow={
        "test_one_engine_of_onnx_runtime_serves_all_calls": (TURNED,),
        "test_whole_prompts_are_natives": [f"{file}, onnxruntime" for file in (FILE, TURNED, LTX23)],
    },
)  # fmt: skip
