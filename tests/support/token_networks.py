"""Tiny transformers on tokens through ComfyUI's own loader.

The loader reads some families' sizes off no file: here it is told them, and does all else by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.controlnet
import comfy.sd
import newer_networks
import tiny_transformers
import torch
from comfy import model_detection
from comfy.model_patcher import ModelPatcher

NOT_IN_FILES = {"qwen_image": tiny_transformers.QWEN_IMAGE, "anima": tiny_transformers.ANIMA}
"""ComfyUI's name of a family -> the sizes of the tiny one that it takes to be always the same."""


@contextmanager
def told() -> Iterator[None]:
    """Add what is in no file to what ComfyUI finds in one, and networks that it lacks."""
    newer_networks.install()
    detect = model_detection.detect_unet_config

    def detected(*args: Any, **kwargs: Any) -> dict | None:
        found = detect(*args, **kwargs)
        return found and {**NOT_IN_FILES.get(found.get("image_model"), {}), **found}

    model_detection.detect_unet_config = detected
    try:
        with tiny_transformers.small_anima_adapter():
            yield
    finally:
        model_detection.detect_unet_config = detect


def load_control(path: str) -> comfy.controlnet.ControlNet:
    """The CONTROL_NET of a file as ComfyUI's loader node gives it."""
    with told():
        return comfy.controlnet.load_controlnet(path)


def load(path: str, dtype: torch.dtype | None = None) -> ModelPatcher:
    """The MODEL of a file as ComfyUI's loader node gives it; ``dtype`` is what its weights are to be."""
    with told():
        return comfy.sd.load_diffusion_model(path, model_options={} if dtype is None else {"dtype": dtype})
