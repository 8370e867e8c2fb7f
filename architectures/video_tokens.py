"""Sizes of transformers that sample videos as tokens of 2 x 2 latent elements of a latent frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from .shapes import MOST, Dim, Examples, Picture, Profile, Range, RequestedSizes, Symbol
from .token_sizes import CPU_TOKENS, PATCH, PICTURE, TokenSizes, unlike

FRAMES = Dim("F")
VIDEO = FRAMES * PICTURE
EACH = 4
"""Frames of the video that a latent frame stands for; the first one stands for one."""
MOST_FRAMES = 33
"""Latent frames that a file engine takes."""
CLIP = 257
"""Tokens that ComfyUI's CLIP encoder makes of a picture."""
MOST_CONTROLS = 4
"""Control videos that a file engine takes."""


@dataclass(frozen=True, kw_only=True)
class VideoSizes(TokenSizes):
    """Batch, latent frames, rows and columns of a frame's tokens, tokens of the prompt and of CLIP, control videos.

    Attributes:
        usual_frames: latent frames of the videos that the family is used for.
        most_frames: those that a file engine takes; a family of pictures has one.
    """

    pixels: int
    usual_frames: int
    most_frames: int = MOST_FRAMES

    usual_prompt = 512
    one_length = True
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 64), "F": Range(1, 5, 1 << 10), "R": Range(1, 16, 1 << 10), "C": Range(1, 14, 1 << 10),
        "T": Range(1, 97, MOST["max_tokens"]), "I": Range(1, 263, 1 << 12), "V": Range(1, 3, 64)}

    @property
    def symbols(self) -> Mapping[str, Symbol]:
        """See ``Architecture``."""
        return {
            "B": Symbol("batch"),
            "F": Symbol("latent frames"),
            "R": Symbol("height", self.pixels, "px"),
            "C": Symbol("width", self.pixels, "px"),
            "T": Symbol("prompt tokens", of_picture=False),
            "I": Symbol("CLIP tokens", of_picture=False),
            "V": Symbol("control videos", of_picture=False),
        }

    def profile(self, asked: RequestedSizes) -> Profile:
        """See ``Architecture``."""
        own = super().profile(asked).only("BRCT").ranges
        frames, clip, controls = (1, self.usual_frames, self.most_frames), (1, CLIP, 2 * CLIP), (1, 1, MOST_CONTROLS)
        more = {"F": frames, "I": clip, "V": controls}
        return Profile({**own, **{symbol: Range(*sizes) for symbol, sizes in more.items()}})

    def examples(self, profile: Profile) -> Examples:
        """See ``Architecture``: odd sizes, several numbers of frames, another batch, prompts of any length."""
        small = {"B": 1, "F": 2, "R": 4, "C": 3, "T": 9, "I": CLIP, "V": 1}
        odd = {"B": 2, "F": 4, "R": 3, "C": 5, "T": 30, "I": 2 * CLIP, "V": 2}
        traced = {"B": 2, "F": 3, "R": 3, "C": 4, "T": 7, "I": 6, "V": 2}
        found = {which: profile.sizes(which) for which in ("min", "opt", "max")}
        symbols = profile.ranges.keys()
        return Examples(
            traced={symbol: size for symbol, size in traced.items() if symbol in symbols},
            compared=unlike(profile.clamp(sizes) for sizes in (small, odd)),
            compiled=[found["opt"]],
            extremes=unlike(found.values()),
            extremes_on_cpu=unlike(_for_cpu(sizes, found["min"]) for sizes in found.values()),
        )

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        """See ``Architecture``."""
        frames = (picture.length - 1) // EACH + 1
        return [{**call, **({"F": frames} if "F" in call else {})} for call in super().calls(profile, picture)]

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``up to 2 in a batch, 256 to 1280 px, 512 tokens, up to 33 latent frames``."""
        frames = profile.ranges.get("F")
        own = super().words(profile)
        if frames is None or self.most_frames == 1:
            return own
        return f"{own}, {'' if frames.min == frames.max else 'up to '}{frames.max} latent frames"

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x480, 512 tokens, 21 latent frames``; the batch where it is not one."""
        parts = [super().call_words(call)]
        if "F" in call and self.most_frames > 1:
            parts.append(f"{call['F']} latent frame{'s' if call['F'] != 1 else ''}")
        if call.get("V", 1) != 1:
            parts.append(f"{call['V']} control videos")
        return ", ".join(parts)


def _for_cpu(sizes: Mapping[str, int], least: Mapping[str, int]) -> dict[str, int]:
    """The nearest call that a CPU bears: of a smaller batch first, then of fewer control videos and frames."""
    found = dict(sizes)
    for symbol in ("B", "V", "F"):
        while found.get(symbol, 1) // 2 >= least.get(symbol, 1) and _tokens(found) > CPU_TOKENS:
            found[symbol] //= 2
    return found


def _tokens(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(symbol, 1) for symbol in "BFRCV")


def to_tokens(video: torch.Tensor, patch: int = PATCH) -> torch.Tensor:
    """(batch, channels, frames, height, width) -> (batch, tokens, features), in the order of native's weights."""
    patches = video.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))
    return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def to_video(tokens: torch.Tensor, frames: int, rows: int, columns: int) -> torch.Tensor:
    """Tokens as the network gives them -> (batch, channels, frames, height, width)."""
    patches = tokens.unflatten(1, (frames, rows, columns)).unflatten(-1, (PATCH, PATCH, -1))
    return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
