"""Sizes as people give and read them, and as a family makes profiles and examples of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .shapes import Profile

LEAST = 16
"""The smallest width or height in pixels that anybody may ask for."""

PRECISIONS = ("float16", "bfloat16", "float32")

SIZE_NAMES = ("min_size", "opt_size", "max_size", "max_images", "max_tokens")
"""The fields of ``RequestedSizes``, as nodes and the command line call them."""

MOST = {"min_size": 8192, "opt_size": 8192, "max_size": 8192, "max_images": 64, "max_tokens": 64 * 77}
"""The largest numbers of each that anybody may ask for."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a family where the user names no numbers.

    Attributes:
        family: its name as people know it.
        min_size, opt_size, max_size: widths and heights in pixels, ``opt_size`` the one to be fastest at.
        max_images: per batch of the latent; the engine takes twice as many, for the two prompts of CFG.
        max_tokens: the longest prompt.
    """

    family: str
    min_size: int
    opt_size: int
    max_size: int
    max_images: int = 1
    max_tokens: int = 231


@dataclass(frozen=True)
class RequestedSizes:
    """Sizes as a user gives them, in pixels, images and tokens; 0 is what fits the model."""

    min_size: int = 0
    opt_size: int = 0
    max_size: int = 0
    max_images: int = 0
    max_tokens: int = 0

    def check(self) -> None:
        """Raise ValueError when no model could have these sizes; the text is for the user."""
        for name, most in MOST.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must lie between 0 and {most}; 0 is what fits the model. Nothing "
                    "was built; correct the number."
                )
        given = [size for size in (self.min_size, self.opt_size, self.max_size) if size]
        if given != sorted(given) or any(size < LEAST for size in given):
            raise ValueError(
                f"smallest ({self.min_size}), best ({self.opt_size}) and largest size ({self.max_size}) must rise in "
                f"this order, from {LEAST} on; 0 is what fits the model. Nothing was built; correct the sizes."
            )


@dataclass(frozen=True)
class Picture:
    """A picture that a graph asks for, in pixels.

    Attributes:
        batches: of the calls that sample it, the usual one first.
    """

    width: int
    height: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Symbol:
    """Words for a symbol: its name, its unit, and units per step (a latent element is 8 px)."""

    word: str
    step: int = 1
    unit: str = ""

    def text(self, size: int) -> str:
        """A size in people's units: ``512 px``."""
        return f"{size * self.step}{self.unit and ' '}{self.unit}"


@dataclass(frozen=True)
class Examples:
    """Sizes of calls, each symbol -> size.

    Attributes:
        traced: for tracing the network, inside the profile or not: small, since half precision is slow on a CPU.
        compared: a few small calls inside the profile, for comparing the graph with native on the CPU.
        compiled: the calls to be fastest at.
        extremes: the least, best and largest calls, for comparing an engine on its device.
        extremes_on_cpu: the same, no larger than a CPU bears.
    """

    traced: dict[str, int]
    compared: list[dict[str, int]]
    compiled: list[dict[str, int]]
    extremes: list[dict[str, int]]
    extremes_on_cpu: list[dict[str, int]]


def words_for(profile: Profile, symbols: Mapping[str, Symbol]) -> str:
    """A profile in words, symbol by symbol."""
    parts = []
    for name, sizes in profile.ranges.items():
        symbol = symbols.get(name, Symbol(name))
        low, high = sizes.min * symbol.step, symbol.text(sizes.max)
        parts.append(f"{symbol.word} {high}" if sizes.min == sizes.max else f"{symbol.word} {low}-{high}")
    return ", ".join(parts)


def outside(profile: Profile, sizes: Mapping[str, int], symbols: Mapping[str, Symbol]) -> str | None:
    """Return why a call of these sizes is outside the profile, in words, or None when it fits."""
    for name, size in sizes.items():
        allowed = profile.ranges.get(name)
        if allowed is not None and not allowed.contains(size):
            symbol = symbols.get(name, Symbol(name))
            least = "" if allowed.min == allowed.max else f"{allowed.min * symbol.step} to "
            return f"{symbol.word} {symbol.text(size)} is outside the engine's {least}{symbol.text(allowed.max)}"
    return None
