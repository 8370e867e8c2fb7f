"""The loop of a stream: a frame is started before the picture of the frame before is taken from the device.

Where frames are in work at several steps, a picture is done some frames later; the order stays the same.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from comfy import model_management

from ..sampling.nan_guard import NOT_FINITE, native_again
from .frame_graph import Picture
from .frames import Frame, Source, download, mean_difference
from .stream import Stream

log = logging.getLogger(__name__)

MOST = 10_000
"""Number of a stream's latest frames that its figures cover."""
MAX_STREAMS = 64
"""Streams whose times are remembered; the oldest is forgotten first."""


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


@dataclass
class _Started:
    """A frame in work, or a frame whose picture the device may still compute.

    Attributes:
        begun: time at which the host began the frame.
        picture: in main memory, as soon as ``end`` is reached; None before its last step is launched.
        sums: sums of engines' results and of the picture; empty without engines.
        end: None if all is there.
        repeats: an earlier frame so similar that its picture serves for this frame too.
    """

    frame: Frame
    begun: float
    picture: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    end: torch.cuda.Event | None = None
    repeats: _Started | None = None

    @property
    def launched(self) -> bool:
        """True if the device has all of the work on its picture."""
        return (self.repeats or self).picture is not None


def run_stream(stream: Stream, source: Source, times: FrameTimes) -> torch.Tensor | None:
    """Make the pictures of a source's frames until there are no more, and return the last; None without frames.

    Args:
        times: takes the times; other threads may read them while the stream runs.
    """
    times.one_by_one = stream.one_by_one
    frames, loop = source.frames(), _Loop(stream, source, times)
    first = next(frames, None)
    if first is not None:
        stream.run(first.image, partial(loop.run, itertools.chain([first], frames)))
    return loop.last


class _Loop:
    """One run of a stream.

    Attributes:
        last: the picture that was given last.
    """

    def __init__(self, stream: Stream, source: Source, times: FrameTimes):
        self._stream, self._source, self._times = stream, source, times
        self.last: torch.Tensor | None = None
        self._there = 0.0
        self._computed: _Started | None = None  # the latest frame that is no repetition
        self._order: deque[_Started] = deque()  # frames whose pictures are not given yet

    def run(self, frames: Iterator[Frame | None]) -> None:
        for frame in frames:
            model_management.throw_exception_if_processing_interrupted()
            if frame is None:
                self._finish(until=self._source.ready)
                continue
            if frame.changes is not None or not self._stream.joins(frame.image):
                self._finish()  # earlier frames may have to be made again with the old settings
            launched = self._start(frame)
            self._give_launched(but=launched)
            if launched is None or launched.end is None or not self._source.ready():
                self._give_launched()  # the picture is done, or the next frame may come late
        self._finish()

    def _finish(self, until: Callable[[], bool] = lambda: False) -> None:
        """Give the pictures of all frames so far, or stop once ``until`` is true."""
        while self._stream.busy and not until():
            model_management.throw_exception_if_processing_interrupted()
            launched = self._launched(self._stream.advance())
            self._give_launched(but=launched)
        self._give_launched()

    def _start(self, frame: Frame) -> _Started | None:
        """Start a frame, and return the frame whose picture this launched."""
        started = _Started(frame, time.perf_counter())
        self._order.append(started)
        if frame.changes is not None:
            self._change(frame)
        elif self._is_like_the_last(frame):
            started.repeats = self._computed
            return self._launched(self._stream.advance()) if self._stream.busy else None  # it may be in work
        self._computed = started
        return self._launched(self._stream.begin(frame.image, frame.number, started))

    def _launched(self, made: tuple[_Started, Picture] | None) -> _Started | None:
        """Begin to take a picture from the device."""
        self._times.steps_apart = self._stream.steps_apart
        if made is None:
            return None
        started, picture = made
        started.picture, started.end = download(picture.pixels)
        if picture.sums is not None:
            started.sums, started.end = download(picture.sums)
        return started

    def _give_launched(self, but: _Started | None = None) -> None:
        """Give pictures in the order of their frames, up to the first that is not launched yet, or to ``but``."""
        while self._order and self._order[0].launched and self._order[0] is not but:
            self._give(self._order.popleft())

    def _change(self, frame: Frame) -> None:
        try:
            self._stream.change(frame.changes)
        except ValueError as error:
            log.warning("Hybrid TRT: %s", error)
            self._source.refuse(str(error), self._stream.now())

    def _is_like_the_last(self, frame: Frame) -> bool:
        last, least = self._computed, self._stream.settings.similar
        if last is None or not least or self._stream.settings.new_seeds or last.frame.image.shape != frame.image.shape:
            return False
        if not self._stream.controls.alike(frame.number, last.frame.number):
            return False
        return mean_difference(frame.image, last.frame.image) <= least

    def _give(self, started: _Started) -> None:
        made = started.repeats or started
        if started.end is not None:
            started.end.synchronize()
        if started.sums is not None and not bool(torch.isfinite(started.sums).all()):
            self._again(started)
        now = time.perf_counter()  # the picture is done; the source's work on it is part of the next frame's time
        self._times.add(1000 * (now - max(started.begun, self._there)))
        self._times.repeated += started.repeats is not None
        self._there = now
        self.last = made.picture
        self._source.give(started.frame.number, made.picture)

    def _again(self, started: _Started) -> None:
        """Have native make a picture that an engine spoilt."""
        log.error("Hybrid TRT: %s; the normal model's image takes its place", NOT_FINITE.detail)
        self._times.again += 1
        self._stream.forget_frames()
        with native_again():
            made = self._stream.picture(started.frame.image, started.frame.number)
        started.picture, started.sums = made.pixels.cpu(), None
