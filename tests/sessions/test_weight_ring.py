"""Streamed weights reach the GPU before their block and are not overwritten while it computes, whatever is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hybrid_trt.sessions.weight_ring import BUFFERS, WeightRing, left_out

CPU = torch.device("cpu")
BLOCKS = 8


class LazyStream:
    """Stands for a CUDA stream: work waits until an event behind it is needed, or until ``finish``."""

    def __init__(self, lost: str = "") -> None:
        self.work: deque[tuple[Callable[[], Any], object]] = deque()
        self.lost = lost

    def do(self, work: Callable[[], Any], mark: object = None) -> None:
        self.work.append((work, mark))

    def record_event(self, event: Event) -> None:
        event.stream, event.recorded = self, event.recorded + 1
        self.do(lambda: None, (event, event.recorded))

    def wait_event(self, event: Event) -> None:
        assert event.recorded, "waits for an event that was never recorded"
        if self.lost != event.name:
            awaited = event, event.recorded
            self.do(lambda: event.stream.run_until(awaited))

    def run_until(self, mark: object) -> None:
        if any(own == mark for _, own in self.work):
            while self.work:
                work, own = self.work.popleft()
                work()
                if own == mark:
                    return

    def finish(self) -> None:
        while self.work:
            self.work.popleft()[0]()


class Event:
    def __init__(self, name: str) -> None:
        self.name, self.recorded, self.stream = name, 0, LazyStream()


class Doubles:
    """Two lazy streams; ``lost`` names the events for which nobody waits."""

    def __init__(self, lost: str = "") -> None:
        self.copying, self._computing = LazyStream(lost), LazyStream(lost)
        self._names = [name for _ in range(BUFFERS) for name in ("ready", "free")] + ["start"]
        self.copied: list[int] = []

    def computing(self) -> LazyStream:
        return self._computing

    def new_event(self) -> Event:
        return Event(self._names.pop(0))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        def work() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            self.copied.append(int(sources[0].flatten()[0]))

        self.copying.do(work)

    def finish(self, first: LazyStream) -> None:
        for stream in (first, self.copying, self._computing):
            stream.finish()


def blocks() -> list[list[torch.Tensor]]:
    """Blocks of a large and a small weight; the large ones have the block's number as values."""
    return [[torch.full((3, 5 + number % 2), float(number)), torch.zeros(2)] for number in range(BLOCKS)]


def seen_by_blocks(
    streams: Doubles, order: Sequence[int], first: LazyStream, calls: int = 2, between: bool = True
) -> list[list[int]]:
    """The numbers that blocks find in their weights, call for call; -1 for weights that are mixed.

    Args:
        first: works ahead of the other stream.
        between: whether all work of a call ends before the next begins.
    """
    outside = [[number != 2, False] for number in range(BLOCKS)]
    ring, own = WeightRing(blocks(), outside, CPU, streams), blocks()
    found: list[list[int]] = []
    for _ in range(calls):
        found.append([])
        with ring.call():
            for number in order:
                with ring.weights(number, own[number]) as weights:
                    streams.computing().do(lambda w=weights, seen=found[-1]: seen.append(number_in(w[0])))
                first.finish()
        if between:
            streams.finish(first)
    streams.finish(first)
    return found


def number_in(weight: torch.Tensor) -> int:
    low, high = weight.aminmax()
    return int(low) if low == high else -1


ORDERS = {"one after another": range(BLOCKS), "twice each": [n for n in range(BLOCKS) for _ in range(2)],
          "another order": [5, 1, 1, 7, 0, 2, 6, 3], "some": [0, 3, 4]}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("first", ["copies first", "computing first"])
def test_each_block_finds_its_own_weights(order: Sequence[int], first: str) -> None:
    streams = Doubles()
    ahead = streams.copying if first == "copies first" else streams.computing()
    assert seen_by_blocks(streams, order, ahead) == [list(order)] * 2


def test_after_the_first_call_each_weight_is_copied_once_and_ahead() -> None:
    streams = Doubles()
    order = ORDERS["another order"]
    seen_by_blocks(streams, order, streams.copying, calls=3)
    assert streams.copied[-len(order) + 1 :] == [number for number in order if number != 2]


@pytest.mark.parametrize(("lost", "first"), [("ready", "computing"), ("free", "copies"), ("start", "copies")])
def test_a_wait_that_is_left_out_shows(lost: str, first: str) -> None:
    streams = Doubles(lost)
    ahead = streams.copying if first == "copies" else streams.computing()
    order = range(BLOCKS)
    assert seen_by_blocks(streams, order, ahead, between=lost != "start") != [list(order)] * 2


def test_a_call_that_fails_leaves_a_ring_that_works() -> None:
    ring, own = WeightRing(blocks(), [[True, False]] * BLOCKS, CPU), blocks()
    with pytest.raises(ValueError, match="broken"), ring.call(), ring.weights(0, own[0]):
        raise ValueError("broken")
    for _ in range(2):
        with ring.call():
            for number in range(BLOCKS):
                with ring.weights(number, own[number]) as weights:
                    assert torch.equal(weights[0], own[number][0])


def test_weights_on_the_gpu_are_lent_as_they_are_and_nothing_is_allocated() -> None:
    own = blocks()
    ring = WeightRing(own, [[False, False]] * BLOCKS, CPU)
    assert ring.bytes == 0
    with ring.call(), ring.weights(3, own[3]) as weights:
        assert weights is own[3]


def large_and_small() -> list[dict[str, int]]:
    """Weights of 19 large and 38 small blocks."""
    sizes = {"a": 16, "b": 12, "c": 6}
    large = [{f"large.{number}.{leaf}": size for leaf, size in sizes.items()} for number in range(19)]
    return large + [{f"small.{number}.{leaf}": 7 for leaf in "ab"} for number in range(38)]


def sizes_of(blocks: list[dict[str, int]], names: set[str]) -> list[int]:
    return [sum(size for name, size in block.items() if name in names) for block in blocks]


def test_each_block_has_the_same_part_of_its_weights_in_main_memory() -> None:
    blocks = large_and_small()
    whole = sum(sizes_of(blocks, {name for block in blocks for name in block}))
    assert left_out(blocks, whole) == set()
    for room in range(whole // 3, whole - 40, 7):
        out = sizes_of(blocks, left_out(blocks, room))
        parts = {size / 34 for size in out[:19]}, {size / 14 for size in out[19:]}
        assert max(*parts[0], *parts[1]) - min(*parts[0], *parts[1]) <= 0.5
        assert sum(out[:10]) < 1.5 * sum(out[9:19]) + 16, "nor have the first blocks more than the last"


def test_what_stays_and_the_buffers_fit_wherever_that_can_be() -> None:
    blocks = large_and_small()
    whole = sum(sizes_of(blocks, {name for block in blocks for name in block}))
    for room in range(BUFFERS * 34 + 1, whole, 7):
        out = sizes_of(blocks, left_out(blocks, room))
        assert whole - sum(out) + BUFFERS * max(out) <= room
        assert whole - sum(out) + BUFFERS * max(out) > room - 60, "no more than needed"
    assert sum(sizes_of(blocks, left_out(blocks, 0))) == whole


def test_weights_that_are_out_stay_out_and_others_join_them() -> None:
    blocks = large_and_small()
    few, many = left_out(blocks, 1100), left_out(blocks, 700)
    assert left_out(blocks, 1100, few) == few
    assert left_out(blocks, 700, few) == many > few
    assert left_out(blocks, 1100, many) == many
    assert left_out(blocks, 1185, {"small.3.a"}) == {"small.3.a"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_copied_begins_its_storage_where_torch_asks_if_memory_is_pinned(dtype: torch.dtype) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    weight = torch.nn.Parameter(memory[16:48].view(dtype).view(2, -1), requires_grad=False)
    ring = WeightRing([[weight]], [[True]], CPU)
    (source,) = ring._blocks[0][0]
    assert source.data_ptr() == source.untyped_storage().data_ptr() == weight.data_ptr()
    memory[16:48] = torch.arange(32, dtype=torch.uint8)
    with ring.call(), ring.weights(0, [weight]) as (lent,):
        assert torch.equal(lent.view(torch.uint8).flatten(), torch.arange(32, dtype=torch.uint8))


def test_kernels_of_convolutions_are_copied_in_their_layout() -> None:
    memory = torch.randn(2 * 3 * 3 * 5 + 4, generator=torch.Generator().manual_seed(1))
    weight = memory[4:].as_strided((2, 5, 3, 3), (45, 1, 15, 5))
    ring = WeightRing([[weight]], [[True]], CPU)
    (source,) = ring._blocks[0][0]
    assert source.data_ptr() == source.untyped_storage().data_ptr() == weight.data_ptr()
    with ring.call(), ring.weights(0, [weight]) as (lent,):
        assert torch.equal(lent, weight)
        assert lent.stride() == weight.stride()
