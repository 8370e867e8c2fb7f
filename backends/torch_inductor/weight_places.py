"""Places of a network's weights: on the GPU, or, for a part of each block's, in main memory, to be streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ...comfy_model.main_memory import available_bytes
from ...engine_library import Unavailable
from ...sessions.gpu_memory import EVERYTHING, free_room, make_room, need_room, no_room
from ...sessions.graph_memory import free_idle_memory
from ...sessions.weight_ring import BUFFERS, left_out

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .network import LiveNetwork

STREAMED_FROM = 1 << 20
"""Bytes of the smallest weights that are streamed; smaller ones stay on the GPU."""

WORTH_IT, WORTH_IT_CALM = 0.5, 0.9
"""Streamed weights come back to the GPU once so small a part of them would still be streamed. The second holds where
nobody asked for memory since they were placed: else some would come and go in each prompt."""

LEAST_SPARE = 1 << 29
"""Bytes that weights leave free once memory was short in a call."""


class WeightPlaces:
    """Decides where the weights of a network are, and has them follow a patcher."""

    def __init__(self, live: LiveNetwork):
        self._live, self._weights, self._device = live, live.weights, live.device
        self._large = [self._weights.large(block, STREAMED_FROM) for block in live.blocks]
        self._most, self._spare, self._calm, self._pins = math.inf, 0, False, True
        self._unused = 0.0

    def limit(self, most: float, unused: float = 0) -> None:
        """Let weights take at most so many bytes of the GPU, where some can be streamed.

        Args:
            unused: bytes more, of the room that ComfyUI leaves to compute in; below 0 as many fewer than are free.
        """
        most += max(0, unused)
        self._most, self._unused = most, unused
        if self._live.streams and self._weights.loaded:
            room = min(most, self._live.bytes + free_room(self._device) + unused)
            self._place(room - self._spare, WORTH_IT_CALM if self._calm else WORTH_IT)
        self._calm = True

    def leave_more_free(self) -> None:
        """Leave more memory free from now on: it was short in a call."""
        self._spare, self._calm, self._unused = 2 * self._spare or LEAST_SPARE, False, 0

    def give_back(self, size: int) -> bool:
        """Let go of weights of so many bytes, which will be streamed; False where that cannot be."""
        if not (self._live.streams and self._weights.loaded and self._pins):
            return False
        self._place(self._live.bytes - size)
        self._calm = False
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
        if thorough and self._weights.outside:
            free_idle_memory(self._device)  # graphs allocate at the start of a run, and not what torch keeps
        if (thorough or not self._weights.complete) and not owned and self._live.streams:
            self._place_as_comfyui(patcher)
        if not self._weights.complete and (size := self._weights.missing(patcher)):
            self._make_room(size, patcher, owned, open_blocks)
        self._live.sync_from(patcher, thorough)
        if not self._live.pinned:
            self._pins = False
            self._live.release()
            self._live.move_out(())
            raise _without_pins()

    def words(self) -> str:
        """Describe in a sentence what is streamed; ``""`` where nothing is."""
        outside, whole = self._weights.size_of(self._weights.outside), self._weights.most_bytes
        if not outside:
            return ""
        here = f"{(whole - outside) / 1e9:.1f} of {whole / 1e9:.1f} GB of the weights stay on the GPU"
        return f"{here}; the rest comes from main memory in each step"

    def _make_room(self, size: int, patcher: ModelPatcher, owned: bool, open_blocks: Callable[[], None]) -> None:
        """Free ``size`` bytes for weights; where memory is short, let some of the blocks' wait in main memory."""
        make_room(size, self._device)
        room = min(self._most, free_room(self._device) + self._unused + self._live.bytes) - self._spare
        if size + self._live.bytes > room or self._weights.outside:
            open_blocks()
            if self._live.streams and owned:
                self._place(room)
            elif self._live.streams:
                self._place_as_comfyui(patcher)
        need_room(self._weights.missing(patcher), self._device)
        if self._weights.outside:
            patcher.partially_unload_ram(EVERYTHING)  # ComfyUI's own copies, from calls of the normal model

    def _place_as_comfyui(self, patcher: ModelPatcher) -> None:
        """Let weights of blocks wait in main memory that ComfyUI itself keeps there, and the ring have its buffers."""
        outside, held = self._kept_by_comfyui(), self._live.bytes - self._weights.bytes
        if self._pins and outside and (outside != self._weights.outside or not held):
            blocks = [sum(size for name, size in block.items() if name in outside) for block in self._large]
            more = BUFFERS * max(blocks) - held + (0 if held else self._spare) - free_room(self._device)
            if more > 0:
                patcher.partially_unload(patcher.offload_device, more)
                outside = self._kept_by_comfyui()
        self._move_out(outside)

    def _kept_by_comfyui(self) -> set[str]:
        native = self._weights.native_outside()
        return {name for block in self._large for name in block if name in native}

    def _place(self, room: float, worth_it: float = WORTH_IT) -> None:
        """Keep so many bytes of weights on the GPU; others, of blocks, wait in main memory.

        Args:
            worth_it: the largest part of the streamed weights that may still be streamed where some come back.

        Raises:
            Unavailable: main memory is short.
        """
        outside = self._weights.outside
        room -= self._weights.most_bytes - sum(sum(block.values()) for block in self._large)  # all blocks share it
        chosen = left_out(self._large, room)
        if self._weights.size_of(chosen) >= worth_it * self._weights.size_of(outside):
            chosen = left_out(self._large, room, outside)
        if (more := self._weights.size_of(chosen - outside)) > available_bytes():
            raise no_room(f"and {more / 1e9:.1f} GB of main memory for streamed weights are not there")
        self._move_out(chosen)

    def _move_out(self, names: Collection[str]) -> None:
        if names and not self._pins:
            raise _without_pins()
        if names != self._weights.outside:
            self._live.move_out(names)


def _without_pins() -> Unavailable:
    """Return the error for weights that would be streamed from memory that is not pinned: native is faster then."""
    return no_room("and ComfyUI does not pin main memory, from where weights could be streamed")
