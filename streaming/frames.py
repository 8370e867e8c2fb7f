"""Frames of a stream: how they are sampled, where they come from, where their pictures go, and how both are copied.

torch shares a copy of a frame out among all cores. On a host with many, that takes longer than the copy itself, and now
and then as long as a frame. So frames in main memory are copied by numpy, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch

AS_CONNECTED, THE_FRAME, EDGES = "as connected", "the frame", "edges of the frame"
FOLLOW = (AS_CONNECTED, THE_FRAME, EDGES)
"""Choices for the control images of a frame."""
STEPS_AS_BATCH = ("lcm", "euler")
"""Samplers whose steps of several frames can be one batch."""
FROM_NOISE = 0.9999
"""Denoise from which ComfyUI samples its whole schedule."""
LEAST_DENOISE = 0.01


@dataclass(frozen=True)
class Settings:
    """The inputs of a frame's sampling, with the names of ComfyUI's KSampler.

    Attributes:
        new_seeds: True if a frame's seed is ``seed`` and its number, added up.
        follow: where control images come from, one of ``FOLLOW``.
        steps_as_batch: True if the steps of neighbouring frames are to be one batch, where that is exact.
        remembered: earlier frames whose tokens self-attention sees too; 0: none, which is exact.
        similar: mean difference of pixels up to which a frame counts as a repetition; 0: never.
    """

    steps: int = 1
    cfg: float = 1.0
    sampler_name: str = "lcm"
    scheduler: str = "sgm_uniform"
    denoise: float = 0.5
    seed: int = 0
    new_seeds: bool = False
    follow: str = AS_CONNECTED
    similar: float = 0.0
    remembered: int = 0
    steps_as_batch: bool = False

    @property
    def from_noise(self) -> bool:
        """True if a picture starts from pure noise, and not from its frame."""
        return self.denoise > FROM_NOISE

    def seed_of(self, number: int) -> int:
        """Return the seed of a frame."""
        return (self.seed + number) % 2**64 if self.new_seeds else self.seed


@dataclass(frozen=True)
class Changes:
    """Settings that change from a frame on; None leaves a setting as it is."""

    prompt: str | None = None
    negative: str | None = None
    strengths: tuple[float, ...] | None = None
    seed: int | None = None
    steps: int | None = None
    denoise: float | None = None
    cfg: float | None = None


@dataclass(frozen=True)
class Frame:
    """One image of a source, shape (1, H, W, 3), float32 0 to 1, on any device."""

    number: int  # of the source; there are gaps where frames were dropped
    image: torch.Tensor
    changes: Changes | None = None


class Source(Protocol):
    """Source of frames, which takes their pictures."""

    def frames(self) -> Iterator[Frame | None]:
        """Yield the next frame, after waiting for it; None while no more come; end with the stream."""
        ...

    def ready(self) -> bool:
        """Tell whether the next frame is there already, so that ``frames`` need not wait for it.

        If not, the loop delivers the current picture before it asks for a frame.
        """
        ...

    def give(self, number: int, picture: torch.Tensor) -> None:
        """Take the picture of a frame, shape (1, H, W, 3), 0 to 1, on the CPU; this must not block."""
        ...

    def refuse(self, why: str, settings: Changes) -> None:
        """Take note that changes were refused, with a sentence for the user; ``settings`` are the current ones."""
        ...


class BatchSource:
    """The images of a batch in order, each once.

    Attributes:
        pictures: the pictures so far, (frames, H, W, 3); None before the first.
    """

    def __init__(self, images: torch.Tensor, progress: Callable[[int], None]):
        """
        Args:
            progress: called with the number of pictures so far.
        """
        self._images = images
        self._progress = progress
        self.pictures: torch.Tensor | None = None

    def frames(self) -> Iterator[Frame]:
        """Yield the images."""
        for number in range(self._images.shape[0]):
            yield Frame(number, self._images[number : number + 1])

    def ready(self) -> bool:
        """Tell that the next frame is there."""
        return True

    def give(self, number: int, picture: torch.Tensor) -> None:
        """Put a picture into the batch."""
        if self.pictures is None:
            self.pictures = torch.empty(self._images.shape[0], *picture.shape[1:], dtype=picture.dtype)
        copy(picture[0], self.pictures[number])
        self._progress(number + 1)

    def refuse(self, why: str, settings: Changes) -> None:
        """Do nothing: images of a batch bring no changes."""


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on the device, in the same memory layout. The host does not wait for the device's other work."""
    if tensor.device == device or device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    copy(tensor, pinned)
    return pinned.to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Return a tensor in main memory, and the event after which it is there."""
    if not tensor.is_cuda:
        return tensor, None
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor.contiguous(), non_blocking=True)
    return there, torch.cuda.current_stream(tensor.device).record_event()


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape and dtype, both in main memory."""
    if source.dtype is torch.bfloat16:  # numpy has none
        target.copy_(source)
    else:
        numpy.copyto(target.numpy(), source.detach().numpy())


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two frames of one shape are apart, on average."""
    if one.is_cpu and other.is_cpu and one.dtype is torch.float32:
        return float(numpy.abs(one.numpy() - other.numpy()).mean())
    return float((one - other.to(one.device)).abs().mean())
