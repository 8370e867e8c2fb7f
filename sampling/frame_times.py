"""Frame times: how long a stream takes for each picture, and how evenly."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection

MOST = 10_000
"""Number of a stream's latest frames that its figures cover."""
MAX_STREAMS = 64
"""Streams remembered; the oldest is forgotten first."""


class FrameTimes:
    """Milliseconds from one picture to the next, less the time that a stream waited for a frame.

    Attributes:
        count: pictures given so far.
        repeated: pictures that repeat an earlier picture, because the frames were alike.
        again: pictures that native made again, because an engine gave NaN.
        one_by_one: why each frame is a sampling of its own, as stock nodes do it; empty if it is not.
        steps_apart: why the steps of its frames are no batch although they were to be, a sentence.
    """

    def __init__(self) -> None:
        self.count = self.repeated = self.again = 0
        self.one_by_one = self.steps_apart = ""
        self._ms: deque[float] = deque(maxlen=MOST)

    def add(self, ms: float) -> None:
        """Count a picture."""
        self.count += 1
        self._ms.append(ms)

    def percentile(self, percent: float) -> float:
        """Return the percentile of the frames' times; 0 without frames."""
        ordered = sorted(self._ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0

    @property
    def fps(self) -> float:
        """Frames a second that the stream can take."""
        return 1000 * len(self._ms) / max(1e-9, sum(self._ms)) if self._ms else 0.0

    def to_json(self) -> dict:
        """Return the figures as data."""
        shares = {f"p{percent}_ms": round(self.percentile(percent), 2) for percent in (50, 95, 99)}
        counts = {"frames": self.count, "repeated": self.repeated, "again": self.again}
        remarks = {"one_by_one": self.one_by_one, "steps_apart": self.steps_apart}
        return {**counts, "fps": round(self.fps, 2), **shares, **remarks}

    def sentence(self) -> str:
        """Return the figures for people."""
        p50, p95, p99 = (f"{self.percentile(percent):.1f}" for percent in (50, 95, 99))
        text = f"Stream: {self.count} frames, {self.fps:.1f} a second; p50 {p50} ms, p95 {p95} ms, p99 {p99} ms"
        if self.repeated:
            text += f"; {self.repeated} repeated, because their frames were alike"
        if self.again:
            text += f"; {self.again} made again at normal speed"
        return " ".join(filter(None, (f"{text}.", self.one_by_one, self.steps_apart)))


_streams: OrderedDict[tuple[str, str], FrameTimes] = OrderedDict()


def record_times(prompt_id: str, node_id: str, times: FrameTimes) -> None:
    """Remember the times of the stream that a node runs; they may still grow."""
    _streams[prompt_id, node_id] = times
    _streams.move_to_end((prompt_id, node_id))
    while len(_streams) > MAX_STREAMS:
        _streams.popitem(last=False)


def prompt_times(prompt_id: str, nodes: Collection[str]) -> list[FrameTimes]:
    """Return the times of a prompt's streams, of some nodes."""
    return [times for (prompt, node), times in list(_streams.items()) if prompt == prompt_id and node in nodes]
