"""Layers and patches that transformers share, written out in torch's own operations.

ComfyUI turns queries and keys with kernels of its own, which no exporter takes; here attention itself turns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from comfy.ldm.common_dit import pad_to_patch_size
from einops import rearrange

from .blocks import OVERRIDE
from .shapes import TensorSpec
from .sizes import IMAGE, PATCH, PROMPT
from .user_attention import computed

MOST_KEPT = 8
"""Results that a binding keeps: rotary embeddings by sizes, and tensors of strengths."""


def rotary_inputs(head: int) -> list[TensorSpec]:
    """Return inputs for cosine and sine of each token's angles, prompt and picture apart: (tokens, ``head`` / 2, 2)."""
    tokens = {"pe_prompt": PROMPT, "pe_image": IMAGE}
    return [TensorSpec(name, "float32", (dim, head // 2, 2), steady=True) for name, dim in tokens.items()]


def numbers(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor of float32 that a binding may keep, with a version: no inference tensor."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def rope_changes(call: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return what other nodes change in the places of a call's tokens, as a key; ``rope_options`` is its inverse."""
    return tuple(sorted(((call.get("transformer_options") or {}).get("rope_options") or {}).items()))


def rope_options(changes: tuple[tuple[str, float], ...]) -> dict[str, Any]:
    """Return the ``transformer_options`` that change the places of tokens."""
    return {"rope_options": dict(changes)} if changes else {}


def turned(x: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring features of ``x`` (batch, heads, tokens, features) by the angles of ``rotary_inputs``."""
    return rotated(x.float(), pe).to(x.dtype)


def rotated(wide: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
    """Turn features in float32; ``pe`` has an angle for each token and pair of features, as cosine and sine.

    Each feature is computed from itself and its partner, where it lies. Inductor then writes queries and keys once.
    Stacked pairs it would write as two halves, and join these by another kernel.
    """
    cos, sin = (t.unsqueeze(-1) for t in pe.unbind(-1))
    partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    both = cos.expand(*(-1,) * (cos.ndim - 1), 2)
    signed = sin * torch.arange(-1, 2, 2, device=wide.device)
    return wide * both.flatten(-2) + partner * signed.flatten(-2)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pe: torch.Tensor | None = None) -> torch.Tensor:
    """Compute attention of (batch, tokens, heads, features); the result is (batch, tokens, heads * features).

    Keys and values may have fewer heads, each for several of the queries.

    Args:
        pe: cosine and sine that turn queries and keys by their tokens' places, (tokens, features / 2, 2).
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if pe is not None:
        q, k = turned(q, pe), turned(k, pe)
    return computed(q, k, v)


@dataclass(eq=False)
class RotaryAttention:
    """Attention in the place of ComfyUI's: turns, then ``user_attention.computed``.

    q, k and v are (batch, heads, tokens, features), the result (batch, tokens, heads * features).

    Attributes:
        pe: see ``attended``; None turns nothing.
    """

    pe: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the ``transformer_options`` that put it in place."""
        return {OVERRIDE: self}

    def __call__(
        self, _native: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int,
        mask: torch.Tensor | None = None, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        if mask is not None:
            raise NotImplementedError("masked attention has no place in these networks")
        if self.pe is not None:
            q, k = turned(q, self.pe), turned(k, self.pe)
        return computed(q, k, v)


def normed(x: torch.Tensor, scale: torch.Tensor | float, eps: float) -> torch.Tensor:
    """Return the RMS norm of ``x`` in float32, times a scale in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale


class PlainNorm(torch.nn.RMSNorm):
    """A norm in operations that older exporters know, computed in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return normed(x, self.weight.to(x.dtype).float(), eps).to(x.dtype)


def write_out_norms(module: torch.nn.Module) -> None:
    """Let the RMS norms of a copy compute in plain operations; their parameters keep their names."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.RMSNorm):
            layer.__class__ = PlainNorm


def to_tokens(video: torch.Tensor, patch: int = PATCH, channels_last: bool = False) -> torch.Tensor:
    """(batch, channels, frames, height, width) -> (batch, tokens, features).

    Args:
        channels_last: the order of a token's features, (rows, columns, channels) in the place of (channels, rows,
            columns); it is that of native's weights.
    """
    features = "ph pw c" if channels_last else "c ph pw"
    return rearrange(video, f"b c f (h ph) (w pw) -> b (f h w) ({features})", ph=patch, pw=patch)


def to_video(
    tokens: torch.Tensor, frames: int, rows: int, columns: int, patch: int = PATCH, channels_last: bool = True
) -> torch.Tensor:
    """The inverse of ``to_tokens``: (batch, tokens, features) -> (batch, channels, frames, height, width)."""
    features, sides = "ph pw c" if channels_last else "c ph pw", {"f": frames, "h": rows, "w": columns}
    return rearrange(tokens, f"b (f h w) ({features}) -> b c f (h ph) (w pw)", ph=patch, pw=patch, **sides)


def latent_to_tokens(x: torch.Tensor, patch: int = PATCH, channels_last: bool = False) -> torch.Tensor:
    """(images, channels, height, width) -> (images, tokens, features) of the padded latent, as ``to_tokens``."""
    return to_tokens(pad_to_patch_size(x, (patch, patch)).unsqueeze(2), patch, channels_last)


def to_latent(
    tokens: torch.Tensor, like: torch.Tensor, patch: int = PATCH, channels_last: bool = False
) -> torch.Tensor:
    """The inverse of ``latent_to_tokens``, without what was padded and without the tokens behind the picture's."""
    height, width = like.shape[2:]
    rows, columns = (-(-side // patch) for side in (height, width))
    latent = to_video(tokens[:, : rows * columns], 1, rows, columns, patch, channels_last)
    return latent[:, :, 0, :height, :width]
