"""Latents, prompts and sizes of large models' calls, and networks that ComfyUI lacks; for ``large_models.py``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

QWEN21 = "qwen_image21"
_PACKAGE = f"comfy.ldm.{QWEN21}"
_SLOT = 16
"""Words in front of references."""


def let_comfyui_know(network: str) -> str:
    """Let this process's ComfyUI load Qwen-Image 2.1; return what stands for native's network, or nothing."""
    if network != QWEN21:
        return ""
    if importlib.util.find_spec(_PACKAGE) is None:
        sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
        importlib.import_module("newer_networks").install()
    file = Path(importlib.import_module(f"{_PACKAGE}.model").QwenImage21Transformer2DModel.forward.__code__.co_filename)
    return "" if file.exists() else "native is the tests' network, without ComfyUI's own kernels"


def noise(case: Any, patcher: Any, size: tuple[int, int], call: Mapping[str, int], seed: int) -> Any:
    """Return random numbers in the shape of a case's latent: for a video with sound, of both.

    Args:
        size: width and height in pixels.
        call: sizes of the network's call.
    """
    random, format_ = torch.Generator().manual_seed(seed), patcher.get_model_object("latent_format")
    pixels, channels = format_.spacial_downscale_ratio, format_.latent_channels
    frames = [(case.length - 1) // format_.temporal_downscale_ratio + 1] if format_.latent_dimensions == 3 else []
    sound: tuple[int, ...] = ()
    if case.network == "minimax_h3":
        channels, frames, sound = 24, [call["F"]], (1, 32, 2, call["A"])
    elif case.network == "ltx2":
        sound = (1, 8, call["A"], 16)
    found = torch.randn((1, channels, *frames, size[1] // pixels, size[0] // pixels), generator=random)
    if not sound:
        return found
    from comfy.nested_tensor import NestedTensor

    return NestedTensor((found, torch.randn(sound, generator=random)))


def flat(latent: Any) -> torch.Tensor:
    """Return a latent as one tensor."""
    return torch.cat([part.flatten() for part in latent.unbind()]) if latent.is_nested else latent


def referring(case: Any, patcher: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Return what a prompt says of its references, which are as large as the picture and stand among its words."""
    if not case.references:
        return {}
    format_ = patcher.get_model_object("latent_format")
    frames = [] if case.network == QWEN21 else [1]
    shape = (1, format_.latent_channels, *frames, *(side // format_.spacial_downscale_ratio for side in reversed(size)))
    return {"reference_latents": [torch.randn(shape) for _ in range(case.references)],
            "image_slots": [_SLOT] * case.references}  # fmt: skip
