"""A stand-in for SageAttention: inexact attention in ComfyUI's table, chosen for all models or as an override."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfy.ldm.modules import attention
from comfy.model_patcher import ModelPatcher

NAME = "soft"
CALLS = {"count": 0}
PLACES = ("optimized_attention", "optimized_attention_masked")


@attention.wrap_attn
def soft(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    """Attention with weaker weights; exact where ComfyUI asks for that, as SageAttention's is."""
    CALLS["count"] += 1
    weaker = 1.0 if more.pop("low_precision_attention", True) is False else 0.6
    return attention.attention_pytorch.__wrapped__(q * weaker, k, v, heads, mask=mask, **more)


def registered(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, NAME, soft)


def started_with(patch: pytest.MonkeyPatch, function: Callable = soft) -> None:
    """Let all of ComfyUI's modules have a function, as a process that is started with its flag has."""
    registered(patch)
    usual = attention.optimized_attention
    for name, module in list(sys.modules.items()):
        if name.startswith("comfy."):
            for place in PLACES:
                if getattr(module, place, None) is usual:
                    patch.setattr(module, place, function)


class PathchSageAttentionKJ:
    """The form of KJNodes' patch."""

    def patch(self, model: ModelPatcher, function: Callable = soft) -> ModelPatcher:
        changed = model.clone()

        def attention_override_sage(_native: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
            return function.__wrapped__(*args, **kwargs)

        changed.model_options["transformer_options"]["optimized_attention_override"] = attention_override_sage
        return changed
