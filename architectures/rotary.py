"""Parts that transformers with rotary embeddings share, written out in torch's own operations.

ComfyUI turns queries and keys with kernels of its own, which no exporter takes; here attention itself turns them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .shapes import TensorSpec
from .sizes import IMAGE, PROMPT

Rotary = Callable[..., dict[str, torch.Tensor]]
"""The sizes of a call -> the tensors of ``rotary_inputs``."""


def rotary_inputs(head: int) -> list[TensorSpec]:
    """Cosine and sine of each token's angles, those of the prompt's tokens apart: (tokens, ``head`` / 2, 2)."""
    tokens = {"pe_prompt": PROMPT, "pe_image": IMAGE}
    return [TensorSpec(name, "float32", (dim, head // 2, 2), steady=True) for name, dim in tokens.items()]


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


@dataclass(eq=False)
class RotaryAttention:
    """Stands for ComfyUI's ``optimized_attention`` in one pass: turns, then scaled_dot_product_attention.

    q, k and v are (batch, heads, tokens, features), the result (batch, tokens, heads * features).
    """

    pe: torch.Tensor

    @property
    def options(self) -> dict[str, Any]:
        """The ``transformer_options`` that put it in place."""
        return {"optimized_attention_override": self}

    def __call__(
        self,
        _native: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if mask is not None:
            raise NotImplementedError("masked attention has no place in these networks")
        attended = F.scaled_dot_product_attention(turned(q, self.pe), turned(k, self.pe), v)
        return attended.transpose(1, 2).flatten(2)


class PlainNorm(torch.nn.RMSNorm):
    """A norm in operations that older exporters know, computed in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if self.weight is not None:
            normed = normed * self.weight.to(x.dtype).float()
        return normed.to(x.dtype)


def write_out_norms(module: torch.nn.Module) -> None:
    """Let the RMS norms of a copy compute in plain operations; their parameters keep their names."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.RMSNorm):
            layer.__class__ = PlainNorm
