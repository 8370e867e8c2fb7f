"""A whole frame as one CUDA graph: encoding, ControlNets, all steps and decoding are one launch for the host.

A stream of few steps waits for its host, not for the GPU: ComfyUI's sampling and the launches of each network take
longer than the networks. Once some frames in a row had the same settings, their launches are captured. From then on a
frame copies its image, its hints, its prompts and its noise into the graph's buffers and replays it.

This needs engines for all calls, which can be part of a larger graph, and unchanged weights. Other frames run as
before, and so does every frame after a change of settings, until the settings are steady again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..architectures import Role
from ..sampling.engine_handle import Calls, calls_listed
from ..sampling.nan_guard import Watch, watched_apart
from ..sessions.cuda_capture import Capture, LargerGraph, part_of
from ..sessions.cuda_graphs import GraphCache
from .open_sampling import Noise

log = logging.getLogger(__name__)

STEADY, STEADY_AGAIN = 10, 90
"""Frames with the same settings before they are captured, at first and after a change: a capture takes the time of many
frames, and settings that change once may change again."""


@dataclass(frozen=True)
class FrameInputs:
    """The inputs that differ from frame to frame: tensors on the device.

    Attributes:
        image: (1, H, W, 3).
        hints: by the number of their ControlNet; ``strengths`` likewise, float32 without dimensions.
        prompts: tensors of the conditionings by name.
        work: latents of the earlier frames in work; None where frames are sampled one after another.
    """

    image: torch.Tensor
    noise: Noise
    hints: Mapping[int, torch.Tensor]
    strengths: Mapping[int, torch.Tensor]
    prompts: Mapping[str, torch.Tensor]
    work: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        steps = {f"noise {n}": drawn for n, drawn in enumerate(self.noise.steps or ())}
        hints = {f"hint {place}": hint for place, hint in self.hints.items()}
        strengths = {f"strength {place}": strength for place, strength in self.strengths.items()}
        prompts = {f"prompt {name}": tensor for name, tensor in self.prompts.items()}
        work = {} if self.work is None else {"work": self.work}
        return {"image": self.image, "noise": self.noise.values, **steps, **hints, **strengths, **prompts, **work}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> FrameInputs:
        """Return the inputs with other tensors of these names."""
        steps = self.noise.steps and tuple(tensors[f"noise {n}"] for n in range(len(self.noise.steps)))
        noise = replace(self.noise, values=tensors["noise"], steps=steps)
        hints = {place: tensors[f"hint {place}"] for place in self.hints}
        strengths = {place: tensors[f"strength {place}"] for place in hints}
        prompts = {name: tensors[f"prompt {name}"] for name in self.prompts}
        return FrameInputs(tensors["image"], noise, hints, strengths, prompts, tensors.get("work"))


@dataclass(frozen=True)
class Made:
    """The pixels of a frame (1, H, W, 3); of frames in work also the finished latent, and ``work`` after the step."""

    pixels: torch.Tensor
    latent: torch.Tensor | None = None
    work: torch.Tensor | None = None


@dataclass(frozen=True)
class Picture:
    """The picture of a frame (1, H, W, 3) on its device; sums of engines' results for it, None without engines.

    Attributes:
        work: latents of the frames in work.
    """

    pixels: torch.Tensor
    sums: torch.Tensor | None
    work: torch.Tensor | None = None


def with_sums(made: Made, watch: Watch) -> Picture:
    """Return a picture with the sums of the watched calls, and its own sum.

    Calls for several frames are watched through each frame's latent: no step removes a NaN from a latent.
    """
    pixels = made.pixels
    if not watch.engines:
        return Picture(pixels, None, made.work)
    seen = watch.sums() if made.latent is None else [made.latent.sum(dtype=torch.float32)]
    totals = (*seen, pixels.sum(dtype=torch.float32))
    return Picture(pixels, torch.stack([total.to(pixels.device) for total in totals]), made.work)


class FrameGraph:
    """Makes the pictures of one stream."""

    def __init__(self, device: torch.device, made: Callable[[FrameInputs], Made],
                 made_of: Callable[[FrameInputs], Made], capture: Capture | None = None):
        """
        Args:
            made: launches all the work of the current frame; ``made_of`` does so with other tensors.
        """
        self._made, self._made_of = made, made_of
        self._graphs = GraphCache(device, limit=1, capture=capture)
        self._can_capture = capture is not None or self._graphs.stream is not None
        self._fixed: Hashable | None = None
        self._steady, self._needed = 0, STEADY
        self._calls: Calls = []  # of the latest frame
        self._read: list[Any] = []
        self._failed: Hashable | None = None

    @property
    def captured(self) -> bool:
        """True if there is a graph."""
        return len(self._graphs) > 0

    def clear(self) -> None:
        """Drop the graph, and all tensors that it read."""
        self._graphs.clear()
        self._calls, self._read, self._steady = [], [], 0

    def picture(self, given: FrameInputs, fixed: Hashable | None, roles: Collection[Role]) -> Picture:
        """Return the picture of a frame.

        Args:
            fixed: all else that it depends on, besides inputs and engines; None if that is not known.
            roles: roles of the networks that it needs, except ControlNets.
        """
        if fixed is None or fixed != self._fixed:
            self._needed = STEADY if self._fixed is None else STEADY_AGAIN
            self._fixed, self._steady = fixed, 0
        self._steady += fixed is not None
        steady = self._can_capture and self._steady > self._needed and fixed != self._failed
        state = self._state(roles) if steady else None
        return self._plainly(given) if state is None else self._by_graph(given, (fixed, state))

    def _state(self, roles: Collection[Role]) -> Hashable | None:
        """Return the state of the latest frame's engines; None if native served a call."""
        if None in self._calls:
            return None
        handles = {call.handle: call for call in self._calls}
        if not {handle.network.role for handle in handles}.issuperset(roles):
            return None
        states = [call.state() for call in handles.values()]
        return None if None in states else tuple(states)

    def _plainly(self, given: FrameInputs) -> Picture:
        with calls_listed() as self._calls, watched_apart() as watch:
            try:
                picture = with_sums(self._made(given), watch)
            finally:
                self._count()
        return picture

    def _by_graph(self, given: FrameInputs, token: Hashable) -> Picture:
        def frame(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            larger = LargerGraph()
            with calls_listed() as self._calls, watched_apart() as watch, part_of(larger):
                picture = with_sums(self._made_of(given.with_tensors(tensors)), watch)
            self._read = larger.read
            work = {} if picture.work is None else {"work": picture.work}
            return {"pixels": picture.pixels, "sums": picture.sums, **work}

        before = self.captured
        results = self._graphs.run(frame, given.tensors(), token=token)
        self._count()
        if self.captured and not before:
            log.info("Hybrid TRT: frames of this stream are one CUDA graph from now on")
        if self._graphs.plain is not None:
            log.info("Hybrid TRT: frames of this stream are no CUDA graph (%s)", self._graphs.plain)
            self._failed = self._fixed
        return Picture(results["pixels"], results["sums"], results.get("work"))

    def _count(self) -> None:
        for call in self._calls:
            if call is not None:
                call.count()
