"""Symbols, dimensions, tensors, profiles and sizes of engines, and random inputs of these shapes.

A *symbol* is a size that may differ from call to call, for example ``B`` batch, ``H`` and ``W`` latent height and
width, ``T`` prompt tokens: each family has its own. Every dimension of every tensor is a number or follows from
symbols, so the symbols of one call say all its shapes. Importing this module needs neither torch nor ComfyUI.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Dim:
    """``ceil(symbol * up / down) + plus``: a latent size after ``down``-fold downsampling, or of a larger hint.

    Stride-2 convolutions with padding 1 give ``ceil(n / 2)``, and nested ceilings of halves equal one ceiling.
    ``Dim("H", down=2) * Dim("W", down=2)`` is the product of both, as a picture in tokens has it. A video's first frame
    is one more than its others.
    """

    symbol: str
    up: int = 1
    down: int = 1
    times: Dim | None = None
    plus: int = 0

    def __mul__(self, other: Dim) -> Dim:
        return replace(self, times=other if self.times is None else self.times * other)

    @property
    def tells(self) -> bool:
        """Tell whether the symbol follows from the size."""
        return self.down == 1 and self.times is None

    @property
    def symbols(self) -> set[str]:
        """Return the symbols that the size follows from."""
        return {self.symbol, *(self.times.symbols if self.times else ())}

    def size(self, symbols: Mapping[str, int]) -> int:
        """Return the number of elements along this dimension, given the symbols of a call."""
        own = -(-symbols[self.symbol] * self.up // self.down) + self.plus
        return own * self.times.size(symbols) if self.times else own

    def __str__(self) -> str:
        scale = f"*{self.up}" if self.up != 1 else f"/{self.down}" if self.down != 1 else ""
        more = f"+{self.plus}" if self.plus else ""
        return self.symbol + scale + more + (f"*{self.times}" if self.times else "")

    @classmethod
    def parse(cls, text: str) -> Dim:
        """The inverse of ``str``: ``"H"``, ``"H*8"``, ``"H/4"``, ``"L*4+1"``, ``"H/2*W/2"``."""
        factors = re.findall(r"([A-Z]+)(?:\*(\d+)|/(\d+))?(?:\+(\d+))?", text)
        return reduce(mul, (cls(symbol, int(up or 1), int(down or 1), plus=int(plus or 0))
                            for symbol, up, down, plus in factors))  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """A named input or output of an engine.

    Attributes:
        dtype: torch's name: float16, bfloat16 or float32.
        optional: a call may leave this input out, which means zeros.
        sample: the distribution of its values in sampling, see ``SAMPLE_RANGES``. Not in an engine's identity.
        steady: whether a binding gives the very same tensor for as long as its values stay, as rotary embeddings.
            Captured graphs copy it only when another tensor comes. Not in an engine's identity.
    """

    name: str
    dtype: str
    dims: tuple[int | Dim, ...]
    optional: bool = False
    sample: str = field(default="normal", compare=False)
    steady: bool = field(default=False, compare=False)

    def shape(self, symbols: Mapping[str, int]) -> Shape:
        """Return the shape of this tensor in a call with these symbols."""
        return tuple(d if isinstance(d, int) else d.size(symbols) for d in self.dims)

    def dynamic_axes(self) -> dict[int, str]:
        """Return axis -> name of every dimension that is not fixed, as ONNX wants it."""
        return {i: str(d) for i, d in enumerate(self.dims) if isinstance(d, Dim)}

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "dims": [d if isinstance(d, int) else str(d) for d in self.dims],
            "optional": self.optional,
        }

    @classmethod
    def from_json(cls, data: Mapping) -> TensorSpec:
        dims = tuple(d if isinstance(d, int) else Dim.parse(d) for d in data["dims"])
        return cls(data["name"], data["dtype"], dims, data["optional"], data.get("sample", "normal"))


@dataclass(frozen=True)
class Range:
    """The sizes of a symbol that an engine accepts; it is tuned for ``opt``. 0: a call may go without the tensor."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise ValueError(f"a profile needs 0 <= min <= opt <= max, not {self.min}, {self.opt}, {self.max}")

    def contains(self, other: Range | int) -> bool:
        low, high = (other, other) if isinstance(other, int) else (other.min, other.max)
        return self.min <= low and high <= self.max


@dataclass(frozen=True)
class Profile:
    """Symbol -> range of sizes: the shapes that an engine is built for."""

    ranges: Mapping[str, Range]

    def contains(self, other: Profile) -> bool:
        """Tell whether every shape of ``other`` fits this profile too."""
        return all(s in self.ranges and self.ranges[s].contains(r) for s, r in other.ranges.items())

    def clamp(self, symbols: Mapping[str, int]) -> dict[str, int]:
        """Return the nearest sizes to ``symbols`` that this profile accepts."""
        return {s: min(max(symbols.get(s, r.opt), r.min), r.max) for s, r in self.ranges.items()}

    def volume(self) -> int:
        """Return the product of the largest sizes. Of two fitting profiles, the smaller is the cheaper engine."""
        return math.prod(r.max for r in self.ranges.values())

    def only(self, symbols: Iterable[str]) -> Profile:
        """Return this profile with the given symbols alone."""
        return Profile({s: r for s, r in self.ranges.items() if s in set(symbols)})

    def sizes(self, which: str) -> dict[str, int]:
        """Return symbol -> size at ``which`` of ``"min"``, ``"opt"``, ``"max"``."""
        return {s: getattr(r, which) for s, r in self.ranges.items()}

    def to_json(self) -> dict:
        return {s: [r.min, r.opt, r.max] for s, r in sorted(self.ranges.items())}

    @classmethod
    def from_json(cls, data: Mapping) -> Profile:
        return cls({s: Range(*r) for s, r in data.items()})

    @classmethod
    def around(cls, calls: Sequence[Mapping[str, int]]) -> Profile:
        """Return the smallest profile that holds some calls, at least one, and is best at the first."""
        first, sizes = calls[0], {s: [call[s] for call in calls] for s in calls[0]}
        return cls({s: Range(min(found), first[s], max(found)) for s, found in sizes.items()})


class ShapeMismatch(ValueError):
    """The tensors of a call do not fit the network, in any size; the text says which and how.

    Attributes:
        other_kind: whether they are for another kind of network; else their batches contradict each other.
    """

    def __init__(self, text: str, other_kind: bool = True):
        super().__init__(text)
        self.other_kind = other_kind


def bind(specs: Iterable[TensorSpec], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Find the symbols of a call from its tensors' shapes, checking every dimension of every tensor.

    Args:
        specs: the engine's inputs; each symbol follows from a dimension of some input (``H`` or ``H*8``).
        shapes: input name -> shape; optional inputs may be absent.

    Raises:
        ShapeMismatch: a tensor missing, of another rank, another fixed size, or sizes that contradict each other.
    """
    symbols: dict[str, int] = {}
    later: list[tuple[TensorSpec, int, Dim]] = []

    def check(spec: TensorSpec, axis: int, wanted: int) -> None:
        shape = shapes[spec.name]
        if shape[axis] != wanted:
            what = f"{spec.name} is {tuple(shape)}, the network takes {wanted} where it has {shape[axis]}"
            raise ShapeMismatch(what, other_kind=axis > 0)

    for spec in specs:
        shape = shapes.get(spec.name)
        if shape is None:
            if spec.optional:
                continue
            raise ShapeMismatch(f"{spec.name} is missing")
        if len(shape) != len(spec.dims):
            raise ShapeMismatch(f"{spec.name} has {len(shape)} dimensions, the network takes {len(spec.dims)}")
        for axis, (size, dim) in enumerate(zip(shape, spec.dims, strict=True)):
            if isinstance(dim, int):
                check(spec, axis, dim)
                continue
            if dim.tells:
                symbols.setdefault(dim.symbol, (size - dim.plus) // dim.up)
            if dim.symbols <= symbols.keys():
                check(spec, axis, dim.size(symbols))
            else:
                later.append((spec, axis, dim))
    for spec, axis, dim in later:
        if dim.symbols <= symbols.keys():
            check(spec, axis, dim.size(symbols))
    return symbols


def symbols_in(specs: Iterable[TensorSpec]) -> set[str]:
    """Return the symbols of some tensors' sizes."""
    return {dim.symbol for spec in specs for dim in spec.dims if not isinstance(dim, int)}


LEAST = 16
"""The smallest width or height in pixels that a user may ask for."""

PRECISIONS = ("float16", "bfloat16", "float32")

SIZE_NAMES = ("min_size", "opt_size", "max_size", "max_images", "max_tokens")
"""The fields of ``RequestedSizes``, as nodes and the command line call them."""

VAE_SETTINGS = ("when_missing", "min_size", "opt_size", "max_size", "backend")
"""The settings of an engine node that a VAE follows; it always computes as ComfyUI does."""

TOKEN_STEP = 77
"""The step of a node's number of tokens."""

MOST = {"min_size": 8192, "opt_size": 8192, "max_size": 8192, "max_images": 64, "max_tokens": 64 * TOKEN_STEP}
"""The largest numbers that a user may ask for."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a family where the user names no numbers.

    Attributes:
        family: its name as people know it.
        min_size, opt_size, max_size: widths and heights in pixels; engines are to be fastest at ``opt_size``.
        max_images: per batch of the latent; the engine takes twice as many, for the two prompts of CFG.
        max_tokens: the longest prompt.
    """

    family: str
    min_size: int
    opt_size: int
    max_size: int
    max_images: int = 1
    max_tokens: int = 3 * TOKEN_STEP


@dataclass(frozen=True)
class RequestedSizes:
    """Sizes as a user gives them, in pixels, images and tokens; 0 stands for the family's number."""

    min_size: int = 0
    opt_size: int = 0
    max_size: int = 0
    max_images: int = 0
    max_tokens: int = 0

    def filled(self, fits: Sizes) -> RequestedSizes:
        """Return these sizes with the family's numbers in the place of zeros; a number that was given wins."""
        given = [size for size in (self.min_size, self.opt_size, self.max_size) if size]
        low = self.min_size or min(fits.min_size, *given, fits.max_size)
        high = self.max_size or max(fits.max_size, *given, low)
        best = self.opt_size or min(max(fits.opt_size, low), high)
        return RequestedSizes(low, best, high, self.max_images or fits.max_images, self.max_tokens or fits.max_tokens)

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
        images: in the latent; 0 where the picture was found in a call alone.
        length: frames of a video.
    """

    width: int
    height: int
    batches: tuple[int, ...]
    images: int = field(default=0, compare=False)
    length: int = 1

    @classmethod
    def sampled(cls, width: int, height: int, images: int, cfg: float | None, length: int = 1) -> Picture:
        """Return the picture of a sampler: with CFG a call has both prompts. None is an unknown CFG."""
        batches = (2 * images, images) if cfg is None else (images,) if cfg == 1 else (2 * images,)
        return cls(width, height, batches, images, length)


@dataclass(frozen=True)
class Symbol:
    """Words for a symbol: its name, its unit, and units per step, as pixels of a latent element.

    Attributes:
        of_picture: whether the size follows from a picture, unlike a prompt's length.
        shown: steps -> what people are shown where it is no multiple, as frames of a video for latent frames.
    """

    word: str
    step: int = 1
    unit: str = ""
    of_picture: bool = True
    shown: Callable[[int], int | str] | None = field(default=None, compare=False)

    def number(self, size: int) -> int | str:
        """Return a size in people's units, without the unit."""
        return self.shown(size) if self.shown else size * self.step

    def text(self, size: int) -> str:
        """Return a size in people's units: ``512 px``."""
        return f"{self.number(size)}{self.unit and ' '}{self.unit}"


@dataclass(frozen=True)
class Examples:
    """Sizes of calls, each symbol -> size.

    Attributes:
        traced: for tracing the network, small, since half precision is slow on a CPU; maybe outside of the profile.
        compared: a few small calls inside the profile, for comparing the graph with native on the CPU.
        timed: a call to be fastest at.
        extremes: the least, best and largest calls, for comparing an engine on its device.
    """

    traced: dict[str, int]
    compared: list[dict[str, int]]
    timed: dict[str, int]
    extremes: list[dict[str, int]]


def words_for(profile: Profile, symbols: Mapping[str, Symbol]) -> str:
    """Return a profile in words, symbol by symbol."""
    parts = []
    for name, sizes in profile.ranges.items():
        symbol = symbols.get(name, Symbol(name))
        low, high = symbol.number(sizes.min), symbol.text(sizes.max)
        parts.append(f"{symbol.word} {high}" if sizes.min == sizes.max else f"{symbol.word} {low}-{high}")
    return ", ".join(parts)


def outside(profile: Profile, sizes: Mapping[str, int], symbols: Mapping[str, Symbol]) -> str | None:
    """Return why a call of these sizes is outside the profile, in words, or None when it fits."""
    for name, size in sizes.items():
        allowed = profile.ranges.get(name)
        if allowed is not None and not allowed.contains(size):
            symbol = symbols.get(name, Symbol(name))
            least = "" if allowed.min == allowed.max else f"{symbol.number(allowed.min)} to "
            return f"{symbol.word} {symbol.text(size)} is outside the engine's {least}{symbol.text(allowed.max)}"
    return None


SAMPLE_RANGES = {"unit": 1, "timestep": 999, "sigma": 1}
"""``TensorSpec.sample`` -> the end of an even distribution from 0 on; ``normal`` is the standard normal one."""

SAMPLING_ENDS = {"timestep": (900, 50), "sigma": (0.95, 0.05)}
"""``TensorSpec.sample`` of a timestep or sigma -> its values near the start and near the end of sampling."""


def sample_inputs(specs: Sequence[TensorSpec], symbols: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    """Return random inputs as in sampling, by name, on the CPU in the specs' dtypes: to trace, compare and compile."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for spec in specs:
        draw, end = (torch.randn, 1) if spec.sample == "normal" else (torch.rand, SAMPLE_RANGES[spec.sample])
        values = draw(spec.shape(symbols), generator=generator) * end
        found[spec.name] = values.to(getattr(torch, spec.dtype))
    return found
