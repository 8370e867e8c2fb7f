"""Sizes and layers of transformers that sample still images as tokens of 2 x 2 latent elements, beside a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from .image_latent import LATENT
from .rotary import turned
from .shapes import MOST, Dim, Examples, Picture, Profile, Range, RequestedSizes, Sizes, Symbol, TensorSpec

if TYPE_CHECKING:
    from .calls import PerImagePass
    from .fused_linear import FusedLinear

PATCH = 2
"""Latent elements per token, along each side."""
PIXELS = LATENT * PATCH
"""Pixels per token, along each side."""
REFERENCES = 3
"""Reference images of the largest size that a file engine takes."""
USUAL_PROMPT = 64
"""Tokens of a prompt where nothing tells its length."""
CPU_TOKENS = 1024
"""On a CPU the batch of a large call is halved until it has no more image tokens than this."""
KEPT = 8
"""Rotary embeddings that a binding keeps, each for one size of picture, prompt and references."""

BATCH, TOKENS, REFERENCE = Dim("B"), Dim("T"), Dim("L")
PICTURE = Dim("R") * Dim("C")


@dataclass(frozen=True)
class TokenSizes:
    """Batch, rows and columns of the picture's tokens, tokens of the prompt and of all reference images.

    ComfyUI runs prompts of unlike lengths one after the other, so the batch is that of the latent as a rule.

    Attributes:
        pixels: per token, along each side.
        patch: latent elements per token, along each side.
        usual_prompt: tokens of a prompt where nothing tells its length.
        one_length: whether all prompts are of one length as a rule, so that a call has both of CFG.
    """

    sizes: Sizes

    per_step = True
    pixels = PIXELS
    patch = PATCH
    usual_prompt = USUAL_PROMPT
    one_length = False
    batch = "B"
    prompt = "T"
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 64), "R": Range(1, 30, 1 << 10), "C": Range(1, 34, 1 << 10),
        "T": Range(1, 97, MOST["max_tokens"]), "L": Range(0, 131, 1 << 17)}
    symbols = {
        "B": Symbol("batch"),
        "R": Symbol("height", PIXELS, "px"),
        "C": Symbol("width", PIXELS, "px"),
        "T": Symbol("prompt tokens", of_picture=False),
        "L": Symbol("reference tokens", of_picture=False),
    }

    def fuse_layers(self, module: torch.nn.Module) -> list[FusedLinear]:
        """See ``Architecture``: none. Large products gain nothing, and joined weights would be held twice."""
        return []

    def passes(self, module: torch.nn.Module) -> list[PerImagePass]:
        """See ``Architecture``: none."""
        return []

    def engine_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """See ``Architecture``."""
        return self.inputs(module, dtype)

    def profile(self, asked: RequestedSizes) -> Profile:
        """See ``Architecture``."""
        asked.check()
        asked = asked.filled(self.sizes)
        size = Range(*(math.ceil(side / self.pixels) for side in (asked.min_size, asked.opt_size, asked.max_size)))
        tokens = Range(1, min(self.usual_prompt, asked.max_tokens), asked.max_tokens)
        batch, references = Range(1, asked.max_images, 2 * asked.max_images), Range(0, 0, REFERENCES * size.max**2)
        return Profile({"B": batch, "R": size, "C": size, "T": tokens, "L": references})

    def examples(self, profile: Profile) -> Examples:
        """See ``Architecture``: odd sizes, another batch, prompts of any length, with references and without."""
        small = {"B": 1, "R": 4, "C": 3, "T": 9, "L": 0}
        odd = {"B": 2, "R": 3, "C": 5, "T": 30, "L": 11}
        opt = profile.sizes("opt")
        return Examples(
            traced={"B": 2, "R": 3, "C": 4, "T": 7, "L": 6},
            compared=unlike(profile.clamp(sizes) for sizes in (small, odd)),
            compiled=[opt],
            extremes=self._extremes(profile, math.inf),
            extremes_on_cpu=self._extremes(profile, CPU_TOKENS),
        )

    def _extremes(self, profile: Profile, most: float) -> list[dict[str, int]]:
        """The least, best and largest sizes, the last with one reference image of the same size."""
        found, least = [], profile.ranges["B"].min
        for which in ("min", "opt", "max"):
            sizes = profile.sizes(which)
            if "L" in sizes:
                sizes["L"] = min(sizes["L"], sizes["R"] * sizes["C"])
            while sizes["B"] // 2 >= least and sizes["B"] * sizes["R"] * sizes["C"] > most:
                sizes["B"] //= 2
            found.append(sizes)
        return unlike(found)

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``up to 2 in a batch, 256 to 1024 px, 512 tokens``."""
        parts, ranges = [], profile.ranges
        if "B" in ranges:
            batch = ranges["B"]
            parts.append(f"batch {batch.max}" if batch.min == batch.max else f"up to {batch.max} in a batch")
        if {"R", "C"} <= ranges.keys():
            height, width = (self._span(ranges[symbol]) for symbol in "RC")
            parts.append(f"{width} px" if height == width else f"{width} x {height} px")
        parts += [f"{ranges['T'].max} tokens"] if "T" in ranges else []
        return ", ".join(parts)

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        """See ``Architecture``: prompts of two lengths are two calls, so each has the batch of the latent."""
        latent, usual = self.pixels // self.patch, profile.sizes("opt")
        rows, columns = (math.ceil(side // latent / self.patch) for side in (picture.height, picture.width))
        size = {"R": rows, "C": columns}
        batches = (picture.images,) if picture.images and not self.one_length else picture.batches
        return [{s: {**size, "B": batch}.get(s, n) for s, n in usual.items()} for batch in batches]

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x1216, 30 tokens``; the batch where it is not one, and tokens of references."""
        parts = [f"{self.pixels * call['C']}x{self.pixels * call['R']}"] if {"R", "C"} <= call.keys() else []
        if call.get("B", 1) != 1:
            parts.append(f"batch {call['B']}")
        parts += [f"{call['T']} tokens"] if "T" in call else []
        parts += [f"{call['L']} reference tokens"] if call.get("L") else []
        return ", ".join(parts)

    def _span(self, sizes: Range) -> str:
        low, high = (self.pixels * size for size in (sizes.min, sizes.max))
        return f"{high}" if low == high else f"{low} to {high}"


def unlike(cases: Iterable[dict[str, int]]) -> list[dict[str, int]]:
    """The cases without repeats."""
    return [dict(found) for found in dict.fromkeys(tuple(sizes.items()) for sizes in cases)]


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pe: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of (batch, tokens, heads, features); the result is (batch, tokens, heads * features).

    Keys and values may have fewer heads, each for several of the queries.

    Args:
        pe: turns queries and keys by their tokens' places, (tokens, features / 2, 2): cosine and sine.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if pe is not None:
        q, k = turned(q, pe), turned(k, pe)
    each = q.shape[1] // k.shape[1]
    if each > 1 and torch.onnx.is_in_onnx_export():
        k, v = (t.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2) for t in (k, v))
        each = 1
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True) if each > 1 else F.scaled_dot_product_attention(
        q, k, v)
    return out.transpose(1, 2).flatten(2)
