"""Places of a network's weights: on the GPU, or, for some blocks, in main memory, from where each step streams them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...comfy_model.main_memory import available_bytes
from ...sessions.gpu_memory import EVERYTHING, free_room, make_room, need_room, no_room
from ...sessions.weight_ring import left_out

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .network import LiveNetwork

STREAMED_FROM = 1 << 20
"""Bytes of the smallest weights that are streamed; smaller ones stay on the GPU."""

WORTH_IT = 0.5
"""Streamed weights come back to the GPU once so small a part of them would still be streamed."""

LEAST_SPARE = 1 << 29
"""Bytes that weights leave free once memory was short in a call."""


class WeightPlaces:
    """Decides where the weights of a network are, and has them follow a patcher."""

    def __init__(self, live: LiveNetwork):
        self._live, self._weights, self._device = live, live.weights, live.device
        self._large = [self._weights.large(block, STREAMED_FROM) for block in live.blocks]
        self._most, self._spare = math.inf, 0

    def limit(self, most: float) -> None:
        """Let weights take at most so many bytes of the GPU, where some can be streamed."""
        self._most = most
        if self._live.streams and self._weights.loaded:
            self._place(most - self._spare)

    def leave_more_free(self) -> None:
        """Leave more memory free from now on: it was short in a call."""
        self._spare = 2 * self._spare or LEAST_SPARE

    def give_back(self, size: int) -> bool:
        """Let go of weights of so many bytes, which will be streamed; False where that cannot be."""
        if not (self._live.streams and self._weights.loaded):
            return False
        self._place(self._live.bytes - size)
        return True

    def follow(self, patcher: ModelPatcher, owned: bool, thorough: bool, open_blocks: Callable[[], None]) -> None:
        """Have the weights take a patcher's values.

        Args:
            owned: whether ComfyUI has no weights on the GPU that could be used.
            thorough: see ``LiveWeights.sync_from``.
            open_blocks: opens the compiled blocks, if they are there: with them weights can be streamed. It is called
                where memory is short, because it takes a while.

        Raises:
            Unavailable: memory is short, or see ``LiveWeights.sync_from``.
        """
        if (thorough or not self._weights.complete) and not owned and self._live.streams:
            self._place_as_comfyui()
        if not self._weights.complete and (size := self._weights.missing(patcher)):
            self._make_room(size, patcher, owned, open_blocks)
        self._live.sync_from(patcher, thorough)

    def words(self) -> str:
        """Describe in a sentence what is streamed; ``""`` where nothing is."""
        outside, whole = self._weights.size_of(self._weights.outside), self._weights.most_bytes
        if not outside:
            return ""
        here = f"{(whole - outside) / 1e9:.1f} of {whole / 1e9:.1f} GB of the weights stay on the GPU"
        slow = "" if self._weights.pinned else ", slowly, because ComfyUI does not pin that memory"
        return f"{here}; the rest comes from main memory in each step{slow}"

    def _make_room(self, size: int, patcher: ModelPatcher, owned: bool, open_blocks: Callable[[], None]) -> None:
        """Free ``size`` bytes for weights; where memory is short, let those of some blocks wait in main memory."""
        make_room(size, self._device)
        room = min(self._most, free_room(self._device) + self._live.bytes) - self._spare
        if size + self._live.bytes > room or self._weights.outside:
            open_blocks()
            if self._live.streams and owned:
                self._place(room)
            elif self._live.streams:
                self._place_as_comfyui()
        need_room(self._weights.missing(patcher), self._device)
        if self._weights.outside:
            patcher.partially_unload_ram(EVERYTHING)  # ComfyUI's own copies, from calls of the normal model

    def _place_as_comfyui(self) -> None:
        """Let the weights of blocks wait in main memory that ComfyUI itself keeps there."""
        native = self._weights.native_outside()
        self._live.move_out({name for names in self._large for name in names if name in native})

    def _place(self, room: float) -> None:
        """Keep so many bytes of weights on the GPU; those of other blocks wait in main memory.

        Raises:
            Unavailable: main memory is short.
        """
        outside, sizes = self._weights.outside, [self._weights.size_of(names) for names in self._large]
        room -= self._weights.most_bytes - sum(sizes)  # what all blocks share
        chosen = left_out(sizes, room)
        if sum(sizes[number] for number in chosen) >= WORTH_IT * self._weights.size_of(outside):
            now = [number for number, names in enumerate(self._large) if not outside.isdisjoint(names)]
            chosen = left_out(sizes, room, now)
        names = {name for number in chosen for name in self._large[number]}
        if (more := self._weights.size_of(names - outside)) > available_bytes():
            raise no_room(f"and {more / 1e9:.1f} GB of main memory for streamed weights are not there")
        if names != outside:
            self._live.move_out(names)
