"""Sizes of networks' calls: symbols, profiles, examples and words for latents, and for tokens of pictures and videos.

Importing this module needs neither torch nor ComfyUI.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from .shapes import MOST, TOKEN_STEP, Dim, Examples, Picture, Profile, Range, RequestedSizes, Sizes, Symbol

if TYPE_CHECKING:
    import torch

    from .calls import PerImagePass
    from .shapes import TensorSpec

LATENT = 8
"""Pixels per latent element, along each side."""
PATCH = 2
"""Latent elements per token, along each side."""
CHUNK = TOKEN_STEP
"""Tokens of the shortest prompt by CLIP; longer prompts have a multiple."""
REFERENCES = 3
"""Reference images of the largest size that a file engine takes."""
EACH = 4
"""Frames of the video for each latent frame behind the first, which stands for a single frame."""
MOST_FRAMES = 33
"""Latent frames that a file engine takes."""
CLIP = 257
"""Tokens that ComfyUI's CLIP encoder makes of a picture."""
MOST_CONTROLS = 4
"""Control videos that a file engine takes."""

BATCH, PROMPT, REFERENCE, FRAMES, IMAGE = Dim("B"), Dim("T"), Dim("L"), Dim("F"), Dim("N")
PICTURE = Dim("R") * Dim("C")
VIDEO = FRAMES * PICTURE

_BATCH, _TEXT = Symbol("batch"), Symbol("prompt tokens", of_picture=False)


@dataclass(frozen=True)
class NetworkSizes:
    """The sizes of calls of any network, with the methods of ``Architecture`` that follow from them.

    Attributes:
        sizes: of engines when the user names no numbers.
        named: the symbols; a symbol with a unit has steps of ``pixels``.
        grid: the symbols of a picture's height and width.
        pixels: along each side, of a latent element or of a token.
        patch: latent elements per token, along each side.
        usual_batch: the batch of a call for one image.
        usual_prompt: steps of the prompt's symbol where its length is not known.
        traced: see ``Examples``.
        compared: calls that a profile makes its own, see ``Examples``.
    """

    sizes: Sizes

    per_step = True
    batch = "B"
    prompt = "T"
    halved: ClassVar[Sequence[str]] = ("B",)
    free: ClassVar[Mapping[str, Range]] = {}
    named: ClassVar[Mapping[str, Symbol]] = {}
    grid: ClassVar[Sequence[str]] = ()
    pixels = PATCH * LATENT
    patch = PATCH
    usual_batch = 1
    usual_prompt = 64
    traced: ClassVar[Mapping[str, int]] = {}
    compared: ClassVar[Sequence[Mapping[str, int]]] = ()

    @property
    def symbols(self) -> Mapping[str, Symbol]:
        return {name: replace(symbol, step=self.pixels) if symbol.unit else symbol
                for name, symbol in self.named.items()}  # fmt: skip

    def passes(self, module: torch.nn.Module) -> list[PerImagePass]:
        """See ``Architecture``: none."""
        return []

    def engine_inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """See ``Architecture``: without passes the inputs of the network."""
        return self.inputs(module, dtype)

    def profile(self, asked: RequestedSizes) -> Profile:
        asked.check()
        return Profile(self._ranges(asked.filled(self.sizes))).only(self.named)

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        """Return the ranges of all symbols for sizes that are complete."""
        low, best = (self._steps(side) for side in (asked.min_size, asked.opt_size))
        longest = math.ceil(asked.max_tokens / self.named["T"].step)
        return {
            "B": Range(1, self.usual_batch, 2 * asked.max_images),
            **self._of_sides(Range(low, best, math.ceil(asked.max_size / self.pixels))),
            "T": Range(1, min(self.usual_prompt, longest), longest),
        }

    def _of_sides(self, side: Range) -> dict[str, Range]:
        """Return the ranges that follow from the steps along a side."""
        return dict.fromkeys(self.grid, side)

    def _steps(self, side: int) -> int:
        """Return the latent elements, or tokens, along a side of so many pixels."""
        return math.ceil(max(1, side * self.patch // self.pixels) / self.patch)

    def examples(self, profile: Profile) -> Examples:
        return Examples(
            traced={symbol: size for symbol, size in self.traced.items() if symbol in profile.ranges},
            compared=_distinct(map(profile.clamp, self.compared)),
            timed=profile.sizes("opt"),
            extremes=_distinct(self._extreme(profile, profile.sizes(which)) for which in ("min", "opt", "max")),
        )

    def _extreme(self, profile: Profile, call: dict[str, int]) -> dict[str, int]:
        """Return the call of sampling that is nearest to an end of a profile."""
        return call

    def calls(self, profile: Profile, picture: Picture) -> list[dict[str, int]]:
        known, usual = self._of_picture(picture), profile.sizes("opt")
        return [{s: {**known, "B": batch}.get(s, n) for s, n in usual.items()} for batch in self._batches(picture)]

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        """Return the sizes that follow from a picture, without the batch."""
        return dict(zip(self.grid, map(self._steps, (picture.height, picture.width)), strict=True))

    def _batches(self, picture: Picture) -> Sequence[int]:
        """Return the batches of the calls that sample a picture."""
        return picture.batches

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``up to 4 images, 256 to 1024 px, 231 tokens``."""
        parts, ranges = [], profile.ranges
        if (batch := ranges.get("B")) is not None:
            parts.append(f"batch {batch.max}" if batch.min == batch.max else self._several(batch.max))
        ends = (self._sides(profile.sizes(which)) for which in ("min", "max"))
        spans = [f"{low} to {high}" if low != high else f"{low}" for low, high in zip(*ends, strict=True)]
        parts += [f"{' x '.join(dict.fromkeys(spans))} px"] if spans else []
        parts += self._prompt_words(profile.sizes("max"))
        return ", ".join(parts)

    def _several(self, batch: int) -> str:
        images = max(1, batch // 2)
        return "1 image" if images == 1 else f"up to {images} images"

    def _sides(self, call: Mapping[str, int]) -> Sequence[int]:
        """Return a picture's width and height in pixels; nothing for a call without them."""
        return [self.pixels * call[symbol] for symbol in reversed(self.grid) if symbol in call]

    def _prompt_words(self, call: Mapping[str, int]) -> list[str]:
        return [f"{self.named['T'].step * call['T']} tokens"] if "T" in call else []

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x1216, 154 tokens``, and a batch other than the usual."""
        parts = self._picture_words(call)
        parts += [f"batch {call['B']}"] if call.get("B", self.usual_batch) != self.usual_batch else []
        return ", ".join([*parts, *self._prompt_words(call)])

    def _picture_words(self, call: Mapping[str, int]) -> list[str]:
        sides = self._sides(call)
        return ["x".join(map(str, sides))] if sides else []


@dataclass(frozen=True)
class LatentSizes(NetworkSizes):
    """Batch, height, width, tokens and batch of hints of networks that work on the latents of still images.

    ComfyUI runs the positive and the negative prompt together, so the batch is up to twice the images.
    """

    halved: ClassVar[Sequence[str]] = ("HB", "B")
    named: ClassVar[Mapping[str, Symbol]] = {
        "B": _BATCH, "H": Symbol("height", unit="px"), "W": Symbol("width", unit="px"), "T": _TEXT,
        "HB": Symbol("images of the control", of_picture=False)}
    grid = "HW"
    pixels = LATENT
    patch = 1
    usual_batch = 2
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "H": 9, "W": 12, "T": CHUNK, "HB": 2}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (
        {"B": 1, "H": 16, "W": 16, "T": CHUNK, "HB": 1}, {"B": 2, "H": 15, "W": 19, "T": 2 * CHUNK, "HB": 1}, traced)

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        own = super()._ranges(asked)
        return {**own, "T": Range(CHUNK, CHUNK, max(CHUNK, asked.max_tokens)), "HB": Range(1, 1, own["B"].max)}

    def _extreme(self, profile: Profile, call: dict[str, int]) -> dict[str, int]:
        """See ``NetworkSizes``: a hint belongs to the whole batch or to each image."""
        return call if call.get("HB", 1) in (1, call["B"]) else {**call, "HB": profile.clamp({"HB": 1})["HB"]}

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        return {**super()._of_picture(picture), "HB": 1}


ANY = LatentSizes(Sizes("", 64, 512, 1024))
"""The sizes of a network of no known family."""


@dataclass(frozen=True)
class ImageTokenSizes(NetworkSizes):
    """Batch, tokens of pictures and of the prompt; a picture and its references are a single row of tokens.

    Only the number of tokens counts, whatever the shape of the picture. References in a graph are not read.
    """

    halved: ClassVar[Sequence[str]] = ("B", "N")
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 64), "N": Range(1, 1000, 1 << 18), "T": Range(1, 130, 1 << 14)}
    named: ClassVar[Mapping[str, Symbol]] = {"B": _BATCH, "N": Symbol("picture size"), "T": _TEXT}
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "N": 12, "T": 7}
    compared: ClassVar[Sequence[Mapping[str, int]]] = ({"B": 1, "N": 16, "T": 8}, {"B": 2, "N": 35, "T": 13})

    @property
    def symbols(self) -> Mapping[str, Symbol]:
        return {**super().symbols, "N": replace(self.named["N"], shown=self._shown)}

    def _shown(self, steps: int) -> str:
        return self._square(self.named["N"].step * steps)

    def _square(self, tokens: int) -> str:
        """Return the square with so many tokens, in words: ``1024x1024``, or ``about 1008x1008`` for a larger one."""
        side = self.pixels * math.isqrt(tokens)
        if side**2 == self.pixels**2 * tokens:
            return f"{side}x{side}"
        return f"about {side + self.pixels}x{side + self.pixels}"

    def _of_sides(self, side: Range) -> dict[str, Range]:
        """See ``NetworkSizes``: squares, and all with as many tokens."""
        return {"N": Range(*(self._groups(steps**2) for steps in (side.min, side.opt, side.max)))}

    def _groups(self, tokens: int) -> int:
        """Return the steps of the symbol of tokens that hold so many."""
        return math.ceil(tokens / self.named["N"].step)

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        return {"N": self._groups(self._steps(picture.height) * self._steps(picture.width))}

    def _sides(self, call: Mapping[str, int]) -> Sequence[int]:
        """See ``NetworkSizes``: the sides of the square with about as many tokens."""
        return [self.pixels * math.isqrt(self.named["N"].step * call["N"])] * 2 if "N" in call else []

    def _picture_words(self, call: Mapping[str, int]) -> list[str]:
        """See ``NetworkSizes``: ``about 1008x1008``."""
        return [self._shown(call["N"])] if "N" in call else []


@dataclass(frozen=True)
class TokenSizes(NetworkSizes):
    """Batch, rows and columns of the picture's tokens, tokens of the prompt and of all reference images.

    ComfyUI runs prompts of different lengths in different calls, so a call mostly has the latent's batch.

    Attributes:
        one_length: whether prompts mostly have the same length, so that a call has both prompts of CFG.
    """

    one_length = False
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 64), "R": Range(1, 30, 1 << 10), "C": Range(1, 34, 1 << 10),
        "T": Range(1, 97, MOST["max_tokens"]), "L": Range(0, 131, 1 << 17)}
    named: ClassVar[Mapping[str, Symbol]] = {
        "B": _BATCH, "R": Symbol("height", unit="px"), "C": Symbol("width", unit="px"), "T": _TEXT,
        "L": Symbol("reference tokens", of_picture=False)}
    grid = "RC"
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "R": 3, "C": 4, "T": 7, "L": 6}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (
        {"B": 1, "R": 4, "C": 3, "T": 9, "L": 0}, {"B": 2, "R": 3, "C": 5, "T": 30, "L": 11})

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        own = super()._ranges(asked)
        batch = Range(1, asked.max_images, 2 * asked.max_images)
        return {**own, "B": batch, "L": Range(0, 0, REFERENCES * own["R"].max ** 2)}

    def _extreme(self, profile: Profile, call: dict[str, int]) -> dict[str, int]:
        """See ``NetworkSizes``: with a single reference image of the picture's size at most."""
        return {**call, "L": min(call["L"], call["R"] * call["C"])} if "L" in call else call

    def _batches(self, picture: Picture) -> Sequence[int]:
        """See ``NetworkSizes``: prompts of two lengths are two calls, each with the latent's batch."""
        return (picture.images,) if picture.images and not self.one_length else picture.batches

    def _several(self, batch: int) -> str:
        return f"up to {batch} in a batch"

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x1216, 30 tokens``, and tokens of references."""
        return super().call_words(call) + (f", {call['L']} reference tokens" if call.get("L") else "")


@dataclass(frozen=True, kw_only=True)
class VideoSizes(TokenSizes):
    """Batch, latent frames, rows and columns of a frame's tokens, tokens of the prompt and of CLIP, control videos.

    Attributes:
        usual_frames: latent frames of the family's usual videos.
        most_frames: latent frames that a file engine takes; 1 for a family of pictures.
    """

    pixels: int
    usual_frames: int
    most_frames: int = MOST_FRAMES

    usual_prompt = 512
    one_length = True
    halved: ClassVar[Sequence[str]] = ("B", "V", "F")
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 64), "F": Range(1, 5, 1 << 10), "R": Range(1, 16, 1 << 10), "C": Range(1, 14, 1 << 10),
        "T": Range(1, 97, MOST["max_tokens"]), "I": Range(1, 263, 1 << 12), "V": Range(1, 3, 64)}
    named: ClassVar[Mapping[str, Symbol]] = {
        "B": _BATCH, "F": Symbol("frames"), "R": TokenSizes.named["R"], "C": TokenSizes.named["C"], "T": _TEXT,
        "I": Symbol("tokens of the picture prompt", of_picture=False), "V": Symbol("control videos", of_picture=False)}
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "F": 3, "R": 3, "C": 4, "T": 7, "I": 6, "V": 2}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (
        {"B": 1, "F": 2, "R": 4, "C": 3, "T": 9, "I": CLIP, "V": 1},
        {"B": 2, "F": 4, "R": 3, "C": 5, "T": 30, "I": 2 * CLIP, "V": 2})

    @property
    def symbols(self) -> Mapping[str, Symbol]:
        return {**super().symbols, "F": replace(self.named["F"], shown=self._length)}

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        frames = Range(1, self.usual_frames, self.most_frames)
        return {**super()._ranges(asked), "F": frames, "I": Range(1, CLIP, 2 * CLIP), "V": Range(1, 1, MOST_CONTROLS)}

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        return {**super()._of_picture(picture), "F": (picture.length - 1) // EACH + 1}

    def _length(self, latent: int) -> int:
        """Return the frames of a video with so many latent frames."""
        return (latent - 1) * EACH + 1

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``up to 2 in a batch, 256 to 1280 px, 512 tokens, up to 129 frames``."""
        frames = profile.ranges.get("F")
        own = super().words(profile)
        if frames is None or self.most_frames == 1:
            return own
        return f"{own}, {'' if frames.min == frames.max else 'up to '}{self._length(frames.max)} frames"

    def call_words(self, call: Mapping[str, int]) -> str:
        """See ``Architecture``: ``832x480, 512 tokens, 81 frames``."""
        parts = [super().call_words(call)]
        if "F" in call and self.most_frames > 1:
            parts.append(f"{self._length(call['F'])} frame{'s' if call['F'] != 1 else ''}")
        if call.get("V", 1) != 1:
            parts.append(f"{call['V']} control videos")
        return ", ".join(parts)


def _distinct(cases: Iterable[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the cases without repeats."""
    return [dict(found) for found in dict.fromkeys(tuple(sizes.items()) for sizes in cases)]
