"""A second way to let self-attention see earlier frames, to compare with: their keys and values, not their tokens."""

from __future__ import annotations

from typing import Any

import torch

PROMPT = 77
"""Keys of the prompt: attention to these is left as it is."""


class EarlierKeys:
    """Attention that computes keys and values of the frame, and puts those of earlier frames behind them."""

    def __init__(self, frames: int):
        self.frames, self.earlier, self.now = frames, [], []

    def next_frame(self) -> None:
        self.earlier, self.now = [self.now, *self.earlier][: self.frames], []

    def __call__(self, native: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **options: Any
                 ) -> torch.Tensor:  # fmt: skip
        if k.shape[1] != PROMPT:
            before = [frame[len(self.now)] for frame in self.earlier if frame]
            self.now.append((k, v))
            k, v = (torch.cat([own, *(one[part] for one in before)], 1) for part, own in enumerate((k, v)))
        return native(q, k, v, heads, **options)
