"""Tokens of earlier frames for self-attention, so that pictures of neighbouring frames look alike.

Each self-attention layer attends to its own tokens and to those that it had at the same step of earlier frames, as if
these were further places of the picture. This is approximate: a picture then depends on the frames before it. The first
frame is exact, and so is one that is like those before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from comfy.ldm.modules.attention import BasicTransformerBlock

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

Place = tuple[int, Any, Any]
"""Number of the call within a frame, ComfyUI's name of the block, and the layer's number in it."""


class KeptTokens:
    """A patch of self-attention (``attn1_patch``) that remembers the tokens of some frames.

    Attributes:
        frames: the number of earlier frames that are remembered.
    """

    def __init__(self, frames: int):
        self.frames = frames
        self._kept: dict[Place, deque[torch.Tensor]] = {}
        self._first: tuple | None = None  # the layer that each call begins with
        self._call = 0

    def begin(self) -> None:
        """Begin another frame."""
        self._first, self._call = None, 0

    def clear(self) -> None:
        """Forget all frames."""
        self._kept.clear()

    def __call__(
        self, n: torch.Tensor, context: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, and what keys and values are made of; see ComfyUI's ``BasicTransformerBlock``."""
        layer = (options.get("block"), options.get("block_index"))
        if self._first is None:
            self._first = layer
        elif layer == self._first:
            self._call += 1
        place = (self._call, *layer)
        kept = self._kept.get(place)
        if kept is None or kept[-1].shape != n.shape or kept[-1].dtype != n.dtype or kept[-1].device != n.device:
            kept = self._kept[place] = deque(maxlen=self.frames)
        context = torch.cat((context, *kept), dim=1) if kept else context
        kept.append(n.clone())  # the next layers may write to it
        return n, context, context


def kept_by(model: ModelPatcher, frames: int) -> KeptTokens | None:
    """Let a model's self-attention see so many earlier frames, and return what remembers them; None for no frames.

    Raises:
        ValueError: this kind of model has no such place; the text is for the user.
    """
    if not frames:
        return None
    layers = model.get_model_object("diffusion_model").modules()
    if not any(isinstance(layer, BasicTransformerBlock) for layer in layers):
        raise ValueError(
            "This kind of model cannot attend to earlier frames, only UNets can, so there are no pictures. "
            "Set 'attend to earlier frames' of TRT Stream to 0."
        )
    kept = KeptTokens(frames)
    model.set_model_attn1_patch(kept)
    return kept
