"""A call whose tokens several GPUs share: a session on each computes its tokens, in a thread of its own.

The threads meet at the first attention over the picture's tokens. From there on they take turns: each copies keys and
values from the other GPUs' memory, and starts its GPU's work up to the next such attention. So all GPUs have to make
the same calls of attention. Threads that run at once would compete for Python's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch

from ..architectures import Architecture
from ..architectures.shapes import ShapeMismatch, TensorSpec, bind
from ..architectures.shared_tokens import put_together, shares, taken
from ..architectures.user_attention import Gather, gathering
from ..comfy_model.torch_kernels import best_attention
from ..engine_library import Reason, Unavailable

if TYPE_CHECKING:
    from .session import Session

PATIENCE = 120
"""Seconds for which a GPU waits for the others."""


class Exchange:
    """Keys and values of the picture's tokens, from each GPU to all others.

    Each GPU has two places for what it gives, and uses them alternately. When all GPUs have given in one, all copies
    from the other have been started.
    """

    def __init__(
        self, devices: Sequence[torch.device], own: Sequence[int], front: int | None, beside: Collection[int]
    ):
        """
        Args:
            own: the picture's tokens of each GPU.
            front, beside: see ``SharedTokens.beside``.
        """
        self._devices, self._own, self._front, self._beside = devices, own, front, beside
        self._before = [sum(own[:rank]) for rank in range(len(own))]
        self._meet = threading.Barrier(len(devices), timeout=PATIENCE)
        self._turns = [threading.Semaphore(int(rank == 0)) for rank in range(len(devices))]
        self._given: list[list[Any]] = [[None] * len(devices) for _ in range(2)]
        self._read: list[list[list[torch.cuda.Event]]] = [[[] for _ in devices] for _ in range(2)]
        cuda = devices[0].type == "cuda"
        self._streams = [[torch.cuda.Stream(device) if cuda else None for device in devices] for _ in devices]

    def end_turn(self, rank: int) -> None:
        """Let the next GPU's thread go on."""
        self._turns[(rank + 1) % len(self._turns)].release()

    def abort(self) -> None:
        """End the others' wait: a GPU has failed."""
        self._meet.abort()
        for turn in self._turns:
            turn.release()

    def end(self) -> None:
        """Let each GPU reuse memory only when the others have read it; after the call, when all threads ended."""
        for place in range(2):
            for rank in range(len(self._devices)):
                self._let_go(place, rank)

    def gather(self, rank: int) -> Gather:
        """Return what gives a GPU the keys and values of all."""
        place, met = 0, False

        def gathered(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal place, met
            own = self._own[rank]
            beside = k.shape[2] - own
            if self._front is not None and beside not in self._beside:
                return k, v  # attention to other tokens
            place = 1 - place
            start = beside if self._front is None else min(self._front, beside)
            found = tuple(self._with_room(t, rank, start) for t in (k, v))
            self._given[place][rank] = self._of_gpu(found, rank, start), _now(self._devices[rank])
            if met:
                self.end_turn(rank)
            else:  # until here each may have weights to load
                self._meet.wait()
                met = True
            if not self._turns[rank].acquire(timeout=PATIENCE) or self._meet.broken:
                raise threading.BrokenBarrierError
            self._let_go(1 - place, rank)
            for other in range(len(self._devices)):
                if other != rank:
                    self._copy(place, rank, other, self._of_gpu(found, other, start))
            return found

        return gathered

    def _with_room(self, t: torch.Tensor, rank: int, start: int) -> torch.Tensor:
        """Return a copy of keys or values with room for the picture's tokens of the other GPUs.

        Tokens follow each other in memory, so that the tokens of a GPU are one piece.

        Args:
            t: (batch, heads, tokens, features).
            start: tokens before the picture's.
        """
        batch, heads, tokens, features = t.shape
        own, begin = self._own[rank], start + self._before[rank]
        behind, count = tokens - start - own, tokens - own + sum(self._own)
        whole = t.new_empty(batch, count, heads, features).transpose(1, 2)
        whole[:, :, :start] = t[:, :, :start]
        whole[:, :, begin : begin + own] = t[:, :, start : start + own]
        whole[:, :, count - behind :] = t[:, :, tokens - behind :]
        return whole

    def _of_gpu(self, whole: Sequence[torch.Tensor], rank: int, start: int) -> list[torch.Tensor]:
        """Return the part of keys and values that is a GPU's own."""
        return [t.narrow(2, start + self._before[rank], self._own[rank]) for t in whole]

    def _copy(self, place: int, rank: int, other: int, into: Sequence[torch.Tensor]) -> None:
        """Copy from another GPU, on a stream of that GPU's which nothing else uses."""
        parts, ready = self._given[place][other]
        stream = self._streams[rank][other]
        if stream is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):  # torch lets the GPU that reads wait for the copy
            for target, part in zip(into, parts, strict=True):
                target.copy_(part, non_blocking=True)
            if stream is not None:
                self._read[place][other].append(stream.record_event())

    def _let_go(self, place: int, rank: int) -> None:
        """Drop what a GPU gave; its own stream waits for the copies, so its memory is free at once.

        ``Tensor.record_stream`` would keep that memory until the host waits for the GPU.
        """
        for event in self._read[place][rank]:
            torch.cuda.current_stream(self._devices[rank]).wait_event(event)
        self._read[place][rank].clear()
        self._given[place][rank] = None


def _now(device: torch.device) -> torch.cuda.Event | None:
    """Return an event at the end of what a GPU has to do so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def run_shared(
    sessions: Sequence[Session], devices: Sequence[torch.device], architecture: Architecture,
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], given: Mapping[str, torch.Tensor],
    extras: Mapping[str, Hashable] | None, threads: Sequence[Executor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Compute a call by several sessions, a share of its tokens each; see ``Session.run``.

    Args:
        threads: one for each session, the same ones in each call: a new thread has cuDNN's plans of attention made
            anew.

    Raises:
        Unavailable: the call cannot be shared, or a GPU failed. The others have stopped then.
    """
    shared = architecture.shared
    try:
        whole = bind(inputs, {name: tuple(tensor.shape) for name, tensor in given.items()})
    except ShapeMismatch as error:
        raise Unavailable(Reason.UNSUPPORTED_INPUT, str(error)) from None
    if whole.get(shared.masked):
        kind = architecture.symbols[shared.masked].word
        raise Unavailable(Reason.UNSUPPORTED_INPUT, f"attention has a mask for its {kind}")
    symbol = shared.symbol(whole, len(sessions))
    parts, results = shares(whole[symbol], len(sessions)), []
    each = [{**whole, symbol: size} for _, size in parts]
    own, (front, beside) = [shared.tokens(outputs, sizes) for sizes in each], shared.beside(whole)
    others = {size for name, size in whole.items() if name not in (symbol, architecture.batch)}
    if not all(own) or others & {count + more for count in own for more in beside}:
        raise Unavailable(Reason.UNSUPPORTED_INPUT, "a GPU's share would be empty, or as long as its prompt or sound")
    exchange = Exchange(devices, own, front, beside)
    inference = torch.is_inference_mode_enabled()
    streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    def compute(rank: int, begin: int, size: int) -> dict[str, torch.Tensor]:
        here = torch.cuda.stream(streams[rank])
        with here, torch.inference_mode(inference), torch.no_grad(), gathering(exchange.gather(rank)):
            try:
                found = sessions[rank].run(taken(inputs, given, whole, symbol, begin, size), extras)
                exchange.end_turn(rank)
                return found
            except BaseException:
                exchange.abort()
                raise

    with best_attention(devices[0]):  # for the whole process: threads inside find what they want, and put it back
        begun = [thread.submit(copy_context().run, compute, rank, *part)
                 for rank, (thread, part) in enumerate(zip(threads, parts, strict=True))]  # fmt: skip
        try:
            for one in begun:
                try:
                    results.append(one.result())
                except Exception as error:
                    results.append(error)
        finally:
            wait(begun)
            exchange.end()
    failed = [error for error in results if isinstance(error, Exception)]
    if failed:
        raise next((e for e in failed if not isinstance(e.__cause__, threading.BrokenBarrierError)), failed[0])
    return put_together(outputs, results, each, symbol)
