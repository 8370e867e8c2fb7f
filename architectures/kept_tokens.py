"""Tokens of earlier frames for self-attention: what remembers them, and how a UNet's engine takes and gives them.

Each self-attention layer attends to its own tokens and to its tokens at the same step of earlier frames, as if these
were further places of the picture. This is approximate: a picture then depends on the frames before it. The first frame
is exact, and so is a frame that equals the frames before it.

A frame reads the kept tokens and writes its own tokens beside them; ``begin`` moves these there. So a frame may be
computed several times, and a CUDA graph of the whole frame finds everything at the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PLACE = "attn1_patch"
"""ComfyUI's name of the place where a patch changes the tokens that self-attention attends to."""


@dataclass
class _Call:
    """A call that each frame makes.

    Attributes:
        shape: of its latents.
        dtype: of latents and tokens.
        slots: for each remembered frame, its parts of ``kept``.
        now: tokens of each layer in the current frame, (B, L, C).
        kept: tokens of each layer in earlier frames, (B, frames * L, C).
        count: the number of filled slots, from the first on.
        next: the slot to be filled next.
        marks: an element for each slot.
        layer: the layer that native computes next.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: list[list[torch.Tensor]]
    now: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    count: int = 0
    next: int = 0
    marks: torch.Tensor | None = None
    layer: int = 0

    def add(self, like: torch.Tensor) -> None:
        """Make room for another layer."""
        batch, length, width = like.shape
        with torch.inference_mode(False):
            now = torch.empty_like(like, memory_format=torch.contiguous_format)
            kept = like.new_empty(batch, len(self.slots) * length, width)
            self.marks = like.new_zeros(len(self.slots)) if self.marks is None else self.marks
        self.now.append(now)  # both or none: memory may lack for the second
        self.kept.append(kept)
        for slot, part in zip(self.slots, self.kept[-1].split(length, dim=1), strict=True):
            slot.append(part)

    def earlier(self, layer: int) -> torch.Tensor:
        """Return a layer's tokens in earlier frames."""
        kept, length = self.kept[layer], self.now[layer].shape[1]
        return kept if self.count == len(self.slots) else kept[:, : self.count * length]

    def advance(self) -> None:
        """Copy the current tokens to the kept tokens, in the place of the oldest."""
        if not self.now:
            return
        torch._foreach_copy_(self.slots[self.next], self.now)
        self.next = (self.next + 1) % len(self.slots)
        self.count = min(self.count + 1, len(self.slots))


class KeptTokens:
    """A patch of self-attention that remembers the tokens of some frames; engines call ``before`` and ``keep``.

    Attributes:
        frames: the number of earlier frames to remember.
        edition: changes whenever tensors lie elsewhere; larger CUDA graphs that read them are void then.
        full: True if every call of the current frame finds so many frames before it.
    """

    def __init__(self, frames: int):
        self.frames = frames
        self.edition = 0
        self.full = False
        self._size: tuple[int, ...] = ()
        self._calls: dict[tuple[torch.device, int], _Call] = {}  # by device and number
        self._done: dict[torch.device, list[_Call]] = {}  # of the frame, in its last launch
        self._first: tuple | None = None  # the layer that each call begins with

    def begin(self, size: tuple[int, ...]) -> None:
        """Begin another frame; a frame of another size has no frames before it."""
        if size != self._size:
            self.clear()
            self._size = size
        done = [call for calls in self._done.values() for call in calls]
        for call in done:
            call.advance()
        self.full = bool(done) and all(call.count == self.frames for call in done)

    def launch(self) -> None:
        """Begin the calls of the frame, or repeat them."""
        self._done = {}

    def clear(self) -> None:
        """Forget all frames."""
        self._calls, self._done, self.full = {}, {}, False
        self.edition += 1

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return (marks, tokens): a mark per earlier frame, then each layer's tokens in the same call of these frames.

        Args:
            x: the latents of the call.
        """
        call = self._calls.get((x.device, len(self._done.get(x.device, ()))))
        if call is None or not call.count or (call.shape, call.dtype) != (tuple(x.shape), x.dtype):
            return x.new_empty(0), []
        return call.marks[: call.count], [call.earlier(layer) for layer in range(len(call.now))]

    def keep(self, x: torch.Tensor, tokens: Sequence[torch.Tensor]) -> None:
        """End a call, with the tokens of its layers."""
        call = self._begun(tuple(x.shape), x)
        while len(call.now) < len(tokens):
            call.add(tokens[len(call.now)].to(x.device, x.dtype))
        torch._foreach_copy_(call.now, list(tokens))

    def _begun(self, shape: tuple[int, ...], like: torch.Tensor) -> _Call:
        done = self._done.setdefault(like.device, [])
        place = (like.device, len(done))
        call = self._calls.get(place)
        if call is None or (call.shape, call.dtype) != (shape, like.dtype):
            call = self._calls[place] = _Call(shape, like.dtype, [[] for _ in range(self.frames)])
            self.edition += 1
        done.append(call)
        return call

    def __call__(
        self, n: torch.Tensor, context: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the inputs of queries, keys and values; see ComfyUI's ``BasicTransformerBlock``."""
        layer = (options.get("block"), options.get("block_index"))
        self._first = self._first or layer
        if layer == self._first:
            self._begun(tuple(options.get("original_shape", n.shape)), n).layer = 0
        call = self._done[n.device][-1]
        if len(call.now) == call.layer:
            call.add(n)
        context = torch.cat((context, call.earlier(call.layer)), dim=1) if call.count else context
        call.now[call.layer].copy_(n)  # the next layers may write to it
        call.layer += 1
        return n, context, context


class TokensOfCall:
    """The patch inside an engine's graph: takes the tokens of earlier frames, and lists the call's own tokens.

    Attributes:
        tokens: of each layer, in order.
    """

    def __init__(self, earlier: Sequence[torch.Tensor]):
        self._earlier = earlier
        self.tokens: list[torch.Tensor] = []

    def __call__(
        self, n: torch.Tensor, context: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        context = torch.cat((context, self._earlier[len(self.tokens)]), dim=1)
        self.tokens.append(n)
        return n, context, context


def kept_in(patches: Mapping[str, Sequence[Any]]) -> KeptTokens | None:
    """Return the call's ``KeptTokens``, if that is its only patch."""
    found = [(place, patch) for place, given in patches.items() for patch in given]
    if len(found) != 1 or found[0][0] != PLACE:
        return None
    return found[0][1] if isinstance(found[0][1], KeptTokens) else None
