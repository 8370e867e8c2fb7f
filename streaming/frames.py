"""Frames of a stream: where they come from, and where their pictures go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Changes:
    """Settings that change with a frame, and stay so; None leaves one as it is."""

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
    """Something that frames come from and that pictures are given to."""

    def frames(self) -> Iterator[Frame | None]:
        """Yield the next frame, after waiting for it; None where the last one is all for now; end with the stream."""
        ...

    def ready(self) -> bool:
        """Tell whether the next frame is there already, so that ``frames`` need not wait for it.

        If not, the loop gives the picture that the device still computes before it asks for a frame.
        """
        ...

    def give(self, number: int, picture: torch.Tensor) -> None:
        """Take the picture of a frame, shape (1, H, W, 3), 0 to 1, on the CPU; this must not block."""
        ...

    def refuse(self, why: str, settings: Changes) -> None:
        """Hear that changes were left out, in a sentence for the user; ``settings`` are those that hold."""
        ...
