"""Frames of a stream: where they come from, and where their pictures go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


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
