"""Layers and patches that transformers share, written out in torch's own operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from comfy.ldm.common_dit import pad_to_patch_size
from einops import rearrange

from .rotary import turned
from .sizes import PATCH

KEPT = 8
"""Rotary embeddings that a binding keeps, each for one size of picture, prompt and references."""


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pe: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of (batch, tokens, heads, features); the result is (batch, tokens, heads * features).

    Keys and values may have fewer heads, each for several of the queries.

    Args:
        pe: turns queries and keys by their tokens' places, (tokens, features / 2, 2): cosine and sine.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if pe is not None:
        q, k = turned(q, pe), turned(k, pe)
    each = q.shape[1] // k.shape[1]
    if each > 1 and torch.onnx.is_in_onnx_export():
        k, v = (t.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2) for t in (k, v))
        each = 1
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True) if each > 1 else F.scaled_dot_product_attention(
        q, k, v)
    return out.transpose(1, 2).flatten(2)


def to_tokens(video: torch.Tensor, patch: int = PATCH) -> torch.Tensor:
    """(batch, channels, frames, height, width) -> (batch, tokens, features), in the order of native's weights."""
    patches = video.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))
    return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def to_video(tokens: torch.Tensor, frames: int, rows: int, columns: int) -> torch.Tensor:
    """Tokens as the network gives them -> (batch, channels, frames, height, width)."""
    patches = tokens.unflatten(1, (frames, rows, columns)).unflatten(-1, (PATCH, PATCH, -1))
    return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def latent_to_tokens(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(images, channels, height, width) -> (images, tokens, channels * patch * patch), as ComfyUI has them."""
    x = pad_to_patch_size(x, (patch, patch))
    return rearrange(x, "b c (h ph) (w pw) -> b (h w) (c ph pw)", ph=patch, pw=patch)


def to_latent(tokens: torch.Tensor, like: torch.Tensor, patch: int) -> torch.Tensor:
    """The inverse of ``latent_to_tokens``, without what was padded and without the tokens behind the picture's."""
    height, width = like.shape[2:]
    rows, columns = (-(-side // patch) for side in (height, width))
    own = tokens[:, : rows * columns]
    latent = rearrange(own, "b (h w) (c ph pw) -> b c (h ph) (w pw)", h=rows, w=columns, ph=patch, pw=patch)
    return latent[:, :, :height, :width]
