"""Weights of blocks that wait in main memory: two buffers on the GPU take turns, and a block finds its own there.

A second stream copies the weights of later blocks while a block computes. Events order copies and uses. A CUDA graph
that is captured meanwhile has both, so its replays copy too.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

BUFFERS = 2
"""Buffers that take turns: one is read while the next is being filled."""

GOLDEN = 0.618034
"""The golden ratio. Its multiples, modulo 1, are spread evenly: they give blocks that are alike an order."""

ALIGNMENT = 256
"""Bytes to which each tensor in a buffer is aligned."""

Weights = Sequence[torch.Tensor]


class Stream(Protocol):
    """The part of a CUDA stream that a ring uses."""

    def record_event(self, event: object) -> object: ...

    def wait_event(self, event: object) -> None: ...


class Streams(Protocol):
    """A device's streams.

    Attributes:
        copying: the stream of the copies.
    """

    copying: Stream

    def computing(self) -> Stream:
        """Return the stream that computes now."""
        ...

    def new_event(self) -> object: ...

    def copy(self, targets: Weights, sources: Weights) -> None:
        """Copy tensors on the stream of the copies; returns at once."""
        ...


class CudaStreams:
    """The streams of a GPU, see ``Streams``."""

    def __init__(self, device: torch.device):
        self._device = device
        self.copying = torch.cuda.Stream(device)
        self.new_event = torch.cuda.Event

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def copy(self, targets: Weights, sources: Weights) -> None:
        with torch.cuda.stream(self.copying):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)


class NoStreams:
    """Stands for the streams of a CPU, where each copy ends before the next work begins."""

    def __init__(self) -> None:
        self.copying = self

    def computing(self) -> NoStreams:
        return self

    def new_event(self) -> None: ...

    def record_event(self, event: None) -> None: ...

    def wait_event(self, event: None) -> None: ...

    def copy(self, targets: Weights, sources: Weights) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


@dataclass
class _Buffer:
    """Memory for the weights of one block.

    Attributes:
        ready: recorded behind the copies into it.
        free: recorded behind the block that read it.
        holds: the block whose weights are in it or on the way, or None.
        read: whether a block of this call has read it.
    """

    memory: torch.Tensor
    ready: object
    free: object
    holds: int | None = None
    read: bool = False


class WeightRing:
    """Lends blocks the weights that wait in main memory.

    Blocks are copied in the order in which the call before used them. A block that comes out of turn waits for a copy.

    Attributes:
        bytes: memory of the buffers.
        pinned: False if a copy needs the host because its source is not pinned; no CUDA graph can have it then.
    """

    def __init__(self, blocks: Sequence[Weights], outside: Sequence[Sequence[bool]], device: torch.device,
                 streams: Streams | None = None):  # fmt: skip
        """
        Args:
            blocks: the weights of each block, in the order of their first use.
            outside: which of these are in main memory.
        """
        self._blocks: dict[int, tuple[Weights, Sequence[bool]]] = {}
        for number, (weights, marks) in enumerate(zip(blocks, outside, strict=True)):
            if any(marks):
                found = [_at_start(weight) if mark else weight for weight, mark in zip(weights, marks, strict=True)]
                self._blocks[number] = found, marks
        asynchronous = device.type == "cuda" and self._blocks
        self.pinned = not asynchronous or all(
            weight.is_pinned() for weights, marks in self._blocks.values()
            for weight, mark in zip(weights, marks, strict=True) if mark)  # fmt: skip
        self._streams = streams or (CudaStreams(device) if asynchronous else NoStreams())
        size = max((_bytes(*block) for block in self._blocks.values()), default=0)
        with torch.inference_mode(False):  # threads outside of it write here too
            memories = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS) if size]
        new_event = self._streams.new_event
        self._buffers = [_Buffer(memory, new_event(), new_event()) for memory in memories]
        self.bytes = size * len(self._buffers)
        self._places: dict[tuple[int, int], tuple[Weights, Weights, Weights]] = {}
        self._start = self._streams.new_event()
        self._order: Sequence[int] = list(self._blocks)
        self._next: deque[int] = deque()
        self._used: list[int] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Copy ahead for the blocks of one call of the network; its blocks run inside."""
        if not self._blocks:
            yield
            return
        copying, computing = self._streams.copying, self._streams.computing()
        computing.record_event(self._start)
        copying.wait_event(self._start)
        self._next, self._used = deque(self._order), []
        for buffer in self._buffers:
            buffer.holds, buffer.read = None, False
            self._fill(buffer)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a capture that failed takes no more work
                self._join(computing)
            raise
        self._join(computing)
        self._order = self._used

    def _join(self, computing: Stream) -> None:
        """Wait for what was copied and not used: what follows may free or fill the buffers."""
        for buffer in self._buffers:
            if buffer.holds is not None:
                computing.wait_event(buffer.ready)

    @contextlib.contextmanager
    def weights(self, number: int, own: Weights) -> Iterator[Weights]:
        """Lend a block's weights while it runs; ``own`` where none of them is in main memory."""
        if number not in self._blocks:
            yield own
            return
        buffer = next((one for one in self._buffers if one.holds == number), None) or self._out_of_turn(number)
        computing = self._streams.computing()
        computing.wait_event(buffer.ready)
        self._used.append(number)
        yield self._place(number, buffer)[0]  # a block that fails ends the call
        computing.record_event(buffer.free)
        buffer.holds, buffer.read = None, True
        self._fill(buffer)

    def _out_of_turn(self, number: int) -> _Buffer:
        """Fill a buffer for a block that was not expected, and copy nothing ahead in the rest of this call."""
        self._next.clear()
        buffer = self._buffers[len(self._used) % len(self._buffers)]
        self._copy(number, buffer)
        return buffer

    def _fill(self, buffer: _Buffer) -> None:
        if self._next:
            self._copy(self._next.popleft(), buffer)

    def _copy(self, number: int, buffer: _Buffer) -> None:
        copying = self._streams.copying
        if buffer.read:
            copying.wait_event(buffer.free)
        _, targets, sources = self._place(number, buffer)
        self._streams.copy(targets, sources)
        copying.record_event(buffer.ready)
        buffer.holds = number

    def _place(self, number: int, buffer: _Buffer) -> tuple[Weights, Weights, Weights]:
        """A block's weights with a buffer's tensors among them; these tensors; what is copied into them."""
        key = (number, id(buffer))
        if key not in self._places:
            weights, outside = self._blocks[number]
            lent, start = list(weights), 0
            for at, (weight, mark) in enumerate(zip(weights, outside, strict=True)):
                if mark:
                    part = buffer.memory[start : start + weight.nbytes].view(weight.dtype)
                    lent[at] = part.as_strided(weight.shape, weight.stride())
                    start += _aligned(weight.nbytes)
            targets = [new for new, mark in zip(lent, outside, strict=True) if mark]
            sources = [old for old, mark in zip(weights, outside, strict=True) if mark]
            self._places[key] = lent, targets, sources
        return self._places[key]


def _at_start(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage begins with it: torch looks only there to see if memory is pinned."""
    dense = weight.is_contiguous() or weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    if weight.data_ptr() == weight.untyped_storage().data_ptr() or not dense:
        return weight
    row = weight.detach().as_strided((weight.numel(),), (1,))
    memory = torch.from_numpy(row.view(torch.uint8).numpy())
    return memory.view(weight.dtype).as_strided(weight.shape, weight.stride())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(weights: Weights, outside: Sequence[bool]) -> int:
    return sum(_aligned(weight.nbytes) for weight, mark in zip(weights, outside, strict=True) if mark)


def left_out(blocks: Sequence[Mapping[str, int]], room: float, outside: Collection[str] = ()) -> set[str]:
    """Choose weights for main memory, the same part of each block, so that the others and the ring's buffers fit.

    Args:
        blocks: names and bytes of each block's weights.
        room: bytes for weights and buffers.
        outside: names that are chosen in any case.

    Returns:
        Their names; all where nothing else fits.
    """
    chosen, out = set(outside), [0] * len(blocks)
    kept, others = 0, []
    for number, block in enumerate(blocks):
        before, whole = 0, sum(block.values())
        for name, size in sorted(block.items(), key=lambda item: -item[1]):
            before += size
            if name in chosen:
                out[number] += size
            else:
                kept += size
                others.append((before / whole, number * GOLDEN % 1, number, name, size))
    for *_, number, name, size in sorted(others):
        if kept + BUFFERS * max(out) <= room:
            break
        chosen.add(name)
        kept, out[number] = kept - size, out[number] + size
    return chosen
