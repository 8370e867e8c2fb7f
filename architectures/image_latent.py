"""Sizes of networks that work on the latents of still images, which most of ComfyUI's networks do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .shapes import TOKEN_STEP, Examples, Picture, Profile, Range, RequestedSizes, Sizes, Symbol

if TYPE_CHECKING:
    import torch

    from .fused_linear import FusedLinear

LATENT = 8
"""Pixels per latent element."""
CHUNK = TOKEN_STEP
"""Tokens of the shortest prompt; longer ones have a multiple."""
CPU_ELEMENTS = 2 * 64 * 64
"""On a CPU the batch of a large call is halved until it has no more latent elements than this."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of networks that work on the latents of still images: batch, height, width, tokens, batch of hints.

    ComfyUI runs the positive and the negative prompt together, so the batch is up to twice the images.
    """

    sizes: Sizes

    per_step = True
    batch = "B"
    prompt = "T"
    free: ClassVar[Mapping[str, Range]] = {}
    symbols = {
        "B": Symbol("batch"),
        "H": Symbol("height", LATENT, "px"),
        "W": Symbol("width", LATENT, "px"),
        "T": Symbol("prompt tokens", of_picture=False),
        "HB": Symbol("hint batch", of_picture=False),
    }

    def fuse_layers(self, module: torch.nn.Module) -> list[FusedLinear]:
        """See ``Architecture``: none."""
        return []

    def profile(self, asked: RequestedSizes) -> Profile:
        """See ``Architecture``."""
        asked.check()
        asked = asked.filled(self.sizes)
        low, best = max(1, asked.min_size // LATENT), max(1, asked.opt_size // LATENT)
        size = Range(low, best, math.ceil(asked.max_size / LATENT))
        tokens = Range(CHUNK, CHUNK, max(CHUNK, asked.max_tokens))
        batch = 2 * asked.max_images
        return Profile({"B": Range(1, 2, batch), "H": size, "W": size, "T": tokens, "HB": Range(1, 1, batch)})

    def examples(self, profile: Profile) -> Examples:
        """See ``Architecture``: odd sizes, another batch, a long prompt; a hint for the whole batch and for each."""
        small = {"B": 1, "H": 16, "W": 16, "T": CHUNK, "HB": 1}
        odd = {"B": 2, "H": 15, "W": 19, "T": 2 * CHUNK, "HB": 1}
        batched = {"B": 2, "H": 9, "W": 12, "T": CHUNK, "HB": 2}
        opt = profile.sizes("opt")
        batches = [opt["B"]] + ([opt["B"] // 2] if opt["B"] % 2 == 0 else [])
        return Examples(
            traced=batched,
            compared=_unlike(profile.clamp(sizes) for sizes in (small, odd, batched)),
            compiled=[{**opt, "B": batch, **({"HB": 1} if "HB" in opt else {})} for batch in batches],
            extremes=_extremes(profile, math.inf),
            extremes_on_cpu=_extremes(profile, CPU_ELEMENTS),
        )

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``up to 4 images, 256 to 1024 px, 231 tokens``."""
        parts = []
        if "B" in profile.ranges:
            batch = profile.ranges["B"]
            images = max(1, batch.max // 2)
            several = "1 image" if images == 1 else f"up to {images} images"
            parts.append(f"batch {batch.max}" if batch.min == batch.max else several)
        if {"H", "W"} <= profile.ranges.keys():
            height, width = (_span(profile.ranges[symbol], LATENT) for symbol in "HW")
            parts.append(f"{width} px" if height == width else f"{width} x {height} px")
        if "T" in profile.ranges:
            parts.append(f"{profile.ranges['T'].max} tokens")
        return ", ".join(parts)

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        """See ``Architecture``."""
        latent = {"H": max(1, picture.height // LATENT), "W": max(1, picture.width // LATENT), "HB": 1}
        usual = profile.sizes("opt")
        return [usual | {s: n for s, n in {**latent, "B": batch}.items() if s in usual} for batch in picture.batches]

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x1216, 154 tokens``; the batch where it is not that of one image with CFG."""
        parts = [f"{LATENT * call['W']}x{LATENT * call['H']}"] if {"H", "W"} <= call.keys() else []
        if call.get("B", 2) != 2:
            parts.append(f"batch {call['B']}")
        if "T" in call:
            parts.append(f"{call['T']} tokens")
        return ", ".join(parts)


ANY = LatentSizes(Sizes("", 64, 512, 1024))
"""For networks of no known family."""


def _span(sizes: Range, step: int) -> str:
    return f"{sizes.min * step}" if sizes.min == sizes.max else f"{sizes.min * step} to {sizes.max * step}"


def _extremes(profile: Profile, most: float) -> list[dict[str, int]]:
    """The least, best and largest sizes; a hint belongs to the whole batch or to each image."""
    found, least = [], profile.sizes("min").get("B", 1)
    for which in ("min", "opt", "max"):
        sizes = profile.sizes(which)
        while sizes.get("B", 1) // 2 >= least and _elements(sizes) > most:
            sizes["B"] //= 2
        if "HB" in sizes and sizes["HB"] not in (1, sizes["B"]):
            sizes["HB"] = profile.clamp({"HB": 1})["HB"]
        found.append(sizes)
    return _unlike(found)


def _elements(sizes: Mapping[str, int]) -> int:
    return sizes["B"] * sizes.get("H", 1) * sizes.get("W", 1)


def _unlike(cases: Iterable[dict[str, int]]) -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    for sizes in cases:
        if sizes not in found:
            found.append(sizes)
    return found
