"""Sizes of VAEs' calls: one picture or video without a prompt. ComfyUI's batches are split, so a call fits each.

Importing this module needs neither torch nor ComfyUI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .shapes import Dim, Picture, Profile, Range, RequestedSizes, Symbol
from .sizes import BATCH, LatentSizes

LATER = Dim("L", plus=1)
"""Latent frames."""


@dataclass(frozen=True)
class VAESizes(LatentSizes):
    """Sizes of a still. A VAE runs once per picture, so its calls are not captured as CUDA graphs."""

    per_step = False
    usual_batch = 1
    arguments = ("images",)
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 1, 1), "H": Range(1, 22, 1 << 11), "W": Range(1, 26, 1 << 11)}

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        own = super()._ranges(asked)
        return {"B": self.free["B"], "H": own["H"], "W": own["W"]}

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``256 to 1024 px``."""
        return super().words(profile.only("HW"))

    def _batches(self, picture: Picture) -> tuple[int, ...]:
        """See ``NetworkSizes``: one call, whatever the batch."""
        return (1,)


@dataclass(frozen=True)
class VideoVAESizes(VAESizes):
    """Sizes of a video, or of a still, which has a single latent frame.

    Attributes:
        each: frames of each latent frame behind the first, which stands for one.
    """

    each = 4
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 1, 1), "L": Range(0, 2, 1 << 10), "H": Range(1, 22, 1 << 10), "W": Range(1, 26, 1 << 10)}
    named: ClassVar[Mapping[str, Symbol]] = {**LatentSizes.named, "L": Symbol("latent frames behind the first")}
    traced: ClassVar[Mapping[str, int]] = {"B": 1, "L": 2, "H": 9, "W": 12}
    compared: ClassVar[tuple[Mapping[str, int], ...]] = ({"B": 1, "L": 0, "H": 16, "W": 16},)

    def latents(self, channels: int) -> tuple[int | Dim, ...]:
        """Return the shape of latents, (batch, channels, frames, height, width)."""
        return BATCH, channels, LATER, Dim("H"), Dim("W")

    def pictures(self, colours: int) -> tuple[int | Dim, ...]:
        """Return the shape of pixels, (batch, colours, frames, height, width)."""
        return BATCH, colours, Dim("L", up=self.each, plus=1), Dim("H", up=self.pixels), Dim("W", up=self.pixels)

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        return {**super()._ranges(asked), "L": self.free["L"]}

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        return {**super()._of_picture(picture), "L": self._later(picture.length)}

    def _later(self, frames: int) -> int:
        """Return the latent frames behind the first of so many frames."""
        return (frames - 1) // self.each

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x480, 21 latent frames``."""
        frames = [f"{call['L'] + 1} latent frames"] if call.get("L") else []
        return ", ".join([*self._picture_words(call), *frames])
