"""A stand-in for SageAttention: its function, inexact, behind ComfyUI's own. It is chosen by flag or by override."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfy.ldm.modules import attention
from comfy.model_patcher import ModelPatcher
from hybrid_trt.comfy_model import whose_code
from newer_attention import set_model_optimized_attention

NAME = "sage"
CALLS = {"count": 0}
PLACES = ("optimized_attention", "optimized_attention_masked")
WEAKER = 0.6
sage = attention.attention_sage


def sageattn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, tensor_layout: str, sm_scale: float | None,
    smooth_k: bool,
) -> torch.Tensor:  # fmt: skip
    """Attention with weaker weights, in the signature of SageAttention's function."""
    CALLS["count"] += 1
    turned = tensor_layout == "NHD"
    q, k, v = (t.transpose(1, 2) if turned else t for t in (q, k, v))
    found = torch.nn.functional.scaled_dot_product_attention(q * WEAKER, k, v, scale=sm_scale, is_causal=is_causal)
    return found.transpose(1, 2) if turned else found


def flash_attn_func(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stand for FlashAttention's function, which is not called."""
    raise NotImplementedError(q.shape)


def _belongs_to(name: str, function: Callable, patch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI have a function from a package of this name."""
    package = ModuleType(name)
    package.__file__ = str(Path(__file__).parent / "site-packages" / name / "__init__.py")
    patch.setitem(sys.modules, name, package)
    for known in (whose_code._own_folders, whose_code._is_known_file, whose_code._is_known_module):
        known.cache_clear()  # a process has its packages when it starts
    function.__code__ = function.__code__.replace(co_filename=package.__file__)
    patch.setattr(attention, function.__name__, function, raising=False)


def installed(patch: pytest.MonkeyPatch) -> None:
    """Have SageAttention in ComfyUI's table, from which ComfyUI's own setter takes it."""
    _belongs_to("sageattention", sageattn, patch)
    _belongs_to("flash_attn", flash_attn_func, patch)
    patch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, NAME, sage)
    patch.setattr(ModelPatcher, "set_model_optimized_attention", set_model_optimized_attention, raising=False)


def started_with(patch: pytest.MonkeyPatch, function: Callable = sage) -> None:
    """Let all of ComfyUI's modules have a function, as in a process that was started with ``--use-sage-attention``."""
    installed(patch)
    usual = attention.optimized_attention
    for name, module in list(sys.modules.items()):
        if name.startswith("comfy."):
            for place in PLACES:
                if getattr(module, place, None) is usual:
                    patch.setattr(module, place, function)


class PathchSageAttentionKJ:
    """The form of KJNodes' patch."""

    def patch(self, model: ModelPatcher) -> ModelPatcher:
        changed = model.clone()

        def attention_override_sage(_native: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
            return sage.__wrapped__(*args, **kwargs)

        changed.model_options["transformer_options"]["optimized_attention_override"] = attention_override_sage
        return changed
