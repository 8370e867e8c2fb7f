"""Prompts with TRT Stream that takes live frames, and the same frame by ComfyUI's own nodes; all on tiny models."""

from __future__ import annotations

from typing import Any

import torch
from comfy_process import ComfyProcess
from hybrid_trt.streaming import pictures
from scenarios import Prompt, node

SAMPLER = {"steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 0.6, "seed": 7}


def _before(strength: float, prompt: str, image: list | None) -> Prompt:
    """The nodes up to the conditionings: ControlNet's image is the frame."""
    return {
        "load": node("CheckpointLoaderSimple", ckpt_name="tiny_sd15.safetensors"),
        "text": node("CLIPTextEncode", clip=["load", 1], text=prompt),
        "empty": node("CLIPTextEncode", clip=["load", 1], text=""),
        "net": node("ControlNetLoader", control_net_name="tiny_sd15_a.safetensors"),
        "picture": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
        "control": node("ControlNetApplyAdvanced", positive=["text", 0], negative=["empty", 0], control_net=["net", 0],
                        image=image or ["picture", 0], strength=strength, start_percent=0.0, end_percent=1.0),
    }  # fmt: skip


def live(strength: float = 0.8, prompt: str = "a cat", wait: int = 30, **sampler: Any) -> Prompt:
    """A prompt whose TRT Stream takes live frames."""
    return _before(strength, prompt, None) | {
        "stream": node(
            "TRTStream", model=["load", 0], vae=["load", 2], clip=["load", 1], positive=["control", 0],
            negative=["control", 1], control_images="the frame", seed_each_frame="the same", similar_frames=0.0,
            wait_seconds=wait, **SAMPLER | sampler),
        "show": node("PreviewImage", images=["stream", 0]),
    }  # fmt: skip


def inverted(prompt: Prompt, frame: list) -> Prompt:
    """The same prompt with a node that makes the control image of a frame."""
    control = prompt["control"] | {"inputs": prompt["control"]["inputs"] | {"image": ["invert", 0]}}
    return prompt | {"invert": node("ImageInvert", image=frame), "control": control}


def by_stock_nodes(
    comfy: ComfyProcess, frame: torch.Tensor, strength: float = 0.8, prompt: str = "a cat", invert: bool = False,
    **sampler: Any,
) -> torch.Tensor:  # fmt: skip
    """The picture that ComfyUI's own nodes make of a frame, as its PNG has it."""
    before = _before(strength, prompt, ["frame", 0])
    (comfy.base / "input" / "live_frame.png").write_bytes(pictures.write(frame, "png"))
    history = comfy.queue((inverted(before, ["frame", 0]) if invert else before) | {
        "frame": node("LoadImage", image="live_frame.png"),
        "encode": node("VAEEncode", pixels=["frame", 0], vae=["load", 2]),
        "sample": node("KSampler", model=["load", 0], positive=["control", 0], negative=["control", 1],
                       latent_image=["encode", 0], **SAMPLER | sampler),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["load", 2]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="live"),
    })  # fmt: skip
    (saved,) = history.output("save", "images")
    return pictures.read((comfy.base / "output" / saved["subfolder"] / saved["filename"]).read_bytes())
