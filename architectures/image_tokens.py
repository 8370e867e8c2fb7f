"""Sizes of transformers that count a picture's tokens, whatever its shape: batch, tokens of pictures and prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .shapes import Dim, Examples, Picture, Profile, Range, RequestedSizes, Sizes, Symbol

if TYPE_CHECKING:
    import torch

    from .fused_linear import FusedLinear
    from .shapes import TensorSpec

BATCH, IMAGE, PROMPT = Dim("B"), Dim("N"), Dim("T")
CPU_TOKENS = 4096
"""On a CPU batch and tokens of a large call are halved until it has no more tokens than this."""


@dataclass(frozen=True)
class ImageTokenSizes:
    """The sizes of a transformer whose picture, and pictures that it refers to, are one row of tokens.

    Attributes:
        latent: pixels per latent element.
        patch: latent elements per token, along a side.
        prompt_tokens: those of the usual prompt.
    """

    sizes: Sizes
    latent: int
    patch: int
    prompt_tokens: int

    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 64), "N": Range(1, 1000, 1 << 18), "T": Range(1, 130, 1 << 14)}
    per_step = True
    batch = "B"
    prompt = "T"
    symbols = {
        "B": Symbol("batch"),
        "N": Symbol("image tokens"),
        "T": Symbol("prompt tokens", of_picture=False),
    }

    @property
    def pixels(self) -> int:
        """Pixels per token, along a side."""
        return self.latent * self.patch

    def fuse_layers(self, module: torch.nn.Module) -> list[FusedLinear]:
        """See ``Architecture``: none."""
        return []

    def passes(self, module: torch.nn.Module) -> list:
        """See ``Architecture``: none."""
        return []

    def engine_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """See ``Architecture``: without passes those of the network."""
        return self.inputs(module, dtype)

    def profile(self, asked: RequestedSizes) -> Profile:
        """See ``Architecture``: squares of these sizes, and all with as many tokens."""
        asked.check()
        asked = asked.filled(self.sizes)
        low, best = (max(1, size // self.pixels) ** 2 for size in (asked.min_size, asked.opt_size))
        tokens = Range(low, best, math.ceil(asked.max_size / self.pixels) ** 2)
        prompt = Range(1, min(self.prompt_tokens, asked.max_tokens), asked.max_tokens)
        return Profile({"B": Range(1, 1, 2 * asked.max_images), "N": tokens, "T": prompt})

    def examples(self, profile: Profile) -> Examples:
        """See ``Architecture``: odd numbers of tokens, another batch, a short prompt."""
        small, odd = {"B": 1, "N": 16, "T": 8}, {"B": 2, "N": 35, "T": 13}
        extremes = [profile.sizes(which) for which in ("min", "opt", "max")]
        return Examples(
            traced={"B": 2, "N": 12, "T": 7},
            compared=_unlike([profile.clamp(sizes) for sizes in (small, odd)]),
            compiled=[profile.sizes("opt")],
            extremes=_unlike(extremes),
            extremes_on_cpu=_unlike([_for_cpu(profile, sizes) for sizes in extremes]),
        )

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``1 image, 256 to 1024 px, 512 tokens``."""
        parts = []
        if (batch := profile.ranges.get("B")) is not None:
            images = max(1, batch.max // 2)
            several = "1 image" if images == 1 else f"up to {images} images"
            parts.append(f"batch {batch.max}" if batch.min == batch.max else several)
        if (tokens := profile.ranges.get("N")) is not None:
            low, high = (self._side(number) for number in (tokens.min, tokens.max))
            parts.append(f"{low} px" if low == high else f"{low} to {high} px")
        if (prompt := profile.ranges.get("T")) is not None:
            parts.append(f"{prompt.max} tokens")
        return ", ".join(parts)

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        """See ``Architecture``. What a graph says of references is not read: a run tells."""
        rows, columns = (
            math.ceil(max(1, side // self.latent) / self.patch) for side in (picture.height, picture.width)
        )
        usual = profile.sizes("opt")
        known = {"N": rows * columns}
        return [usual | {s: n for s, n in {**known, "B": batch}.items() if s in usual} for batch in picture.batches]

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``4096 image tokens (1024x1024), 256 tokens``; the batch where it is not 1."""
        parts = []
        if "N" in call:
            side = self._side(call["N"])
            as_square = f" ({side}x{side})" if (side // self.pixels) ** 2 == call["N"] else ""
            parts.append(f"{call['N']} image tokens{as_square}")
        if call.get("B", 1) != 1:
            parts.append(f"batch {call['B']}")
        if "T" in call:
            parts.append(f"{call['T']} tokens")
        return ", ".join(parts)

    def _side(self, tokens: int) -> int:
        """Pixels along a side of the square with about so many tokens."""
        return self.pixels * math.isqrt(tokens)


def _for_cpu(profile: Profile, sizes: Mapping[str, int]) -> dict[str, int]:
    """The nearest call that a CPU bears, if the profile holds such."""
    found = dict(sizes)
    for symbol in ("B", "N"):
        least = profile.ranges[symbol].min if symbol in profile.ranges else 1
        while found.get(symbol, 1) // 2 >= least and found.get("B", 1) * found.get("N", 1) > CPU_TOKENS:
            found[symbol] //= 2
    return found


def _unlike(cases: list[dict[str, int]]) -> list[dict[str, int]]:
    return [sizes for number, sizes in enumerate(cases) if sizes not in cases[:number]]
