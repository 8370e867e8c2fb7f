"""The words for an engine's inputs and outputs: symbols, dimensions, tensors, profiles.

A *symbol* is a size that may differ from call to call, for example ``B`` batch, ``H`` and ``W`` latent height and
width, ``T`` prompt tokens: each family has its own. Every dimension of every tensor is a number or follows from one
symbol, so the symbols of one call say all its shapes. Nothing here needs torch, ComfyUI or a backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Dim:
    """``ceil(symbol * up / down)``: a latent size after ``down``-fold downsampling, or of an ``up`` times larger hint.

    Stride-2 convolutions with padding 1 give ``ceil(n / 2)``, and nested ceilings of halves equal one ceiling.
    """

    symbol: str
    up: int = 1
    down: int = 1

    def size(self, symbols: Mapping[str, int]) -> int:
        """The number of elements along this dimension, given the symbols of a call."""
        return -(-symbols[self.symbol] * self.up // self.down)

    def __str__(self) -> str:
        scale = f"*{self.up}" if self.up != 1 else f"/{self.down}" if self.down != 1 else ""
        return self.symbol + scale

    @classmethod
    def parse(cls, text: str) -> Dim:
        """The inverse of ``str``: ``"H"``, ``"H*8"``, ``"H/4"``."""
        for mark, name in (("*", "up"), ("/", "down")):
            if mark in text:
                symbol, factor = text.split(mark)
                return cls(symbol, **{name: int(factor)})
        return cls(text)


@dataclass(frozen=True)
class TensorSpec:
    """One named input or output of an engine.

    Attributes:
        dtype: torch's name: float16, bfloat16 or float32.
        optional: a call may leave this input out, which means zeros.
        sample: which values it has in sampling, see ``samples``; no part of what an engine is.
        late: whether a call may give this input while others still compute it; no part of what an engine is either.
    """

    name: str
    dtype: str
    dims: tuple[int | Dim, ...]
    optional: bool = False
    sample: str = field(default="normal", compare=False)
    late: bool = field(default=False, compare=False)

    def shape(self, symbols: Mapping[str, int]) -> Shape:
        """The shape of this tensor in a call with these symbols."""
        return tuple(d if isinstance(d, int) else d.size(symbols) for d in self.dims)

    def dynamic_axes(self) -> dict[int, str]:
        """Axis -> name of every dimension that is not fixed, as ONNX wants it."""
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
        sample, late = data.get("sample", "normal"), data.get("late", False)
        return cls(data["name"], data["dtype"], dims, data["optional"], sample, late)


@dataclass(frozen=True)
class Range:
    """The sizes of one symbol that an engine accepts; ``opt`` is the size it is tuned for."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise ValueError(f"a profile needs 1 <= min <= opt <= max, not {self.min}, {self.opt}, {self.max}")

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
        """The nearest sizes to ``symbols`` that this profile accepts."""
        return {s: min(max(symbols.get(s, r.opt), r.min), r.max) for s, r in self.ranges.items()}

    def volume(self) -> int:
        """Return how much the largest call holds; of two profiles that both fit, the smaller is the cheaper engine."""
        total = 1
        for r in self.ranges.values():
            total *= r.max
        return total

    def only(self, symbols: Iterable[str]) -> Profile:
        """This profile with just the symbols that an architecture uses."""
        return Profile({s: r for s, r in self.ranges.items() if s in set(symbols)})

    def sizes(self, which: str) -> dict[str, int]:
        """Symbol -> size at ``which`` of ``"min"``, ``"opt"``, ``"max"``."""
        return {s: getattr(r, which) for s, r in self.ranges.items()}

    def at_best(self) -> Profile:
        """The one size that this profile is best at, as a profile."""
        return Profile({s: Range(r.opt, r.opt, r.opt) for s, r in self.ranges.items()})

    def to_json(self) -> dict:
        return {s: [r.min, r.opt, r.max] for s, r in sorted(self.ranges.items())}

    @classmethod
    def from_json(cls, data: Mapping) -> Profile:
        return cls({s: Range(*r) for s, r in data.items()})

    @classmethod
    def around(cls, calls: Sequence[Mapping[str, int]]) -> Profile:
        """The smallest profile that holds some calls, at least one, and is best at the first."""
        first, sizes = calls[0], {s: [call[s] for call in calls] for s in calls[0]}
        return cls({s: Range(min(found), first[s], max(found)) for s, found in sizes.items()})


class ShapeMismatch(ValueError):
    """The tensors of a call do not fit the network, in whatever size; the text says which and how.

    Attributes:
        other_kind: whether they are of another kind of network; else their batches contradict each other.
    """

    def __init__(self, text: str, other_kind: bool = True):
        super().__init__(text)
        self.other_kind = other_kind


def bind(specs: Iterable[TensorSpec], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Find the symbols of a call from its tensors' shapes, checking every dimension of every tensor.

    Args:
        specs: the engine's inputs, those with plain symbols (``B``, ``H``) before those with derived ones (``H/4``).
        shapes: input name -> shape; optional inputs may be absent.

    Raises:
        ShapeMismatch: a tensor missing, of another rank, another fixed size, or sizes that contradict each other.
    """
    symbols: dict[str, int] = {}
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
                wanted = dim
            elif dim.symbol in symbols:
                wanted = dim.size(symbols)
            elif dim.up == dim.down == 1:
                symbols[dim.symbol] = wanted = size
            else:
                continue
            if size != wanted:
                what = f"{spec.name} is {tuple(shape)}, the network takes {wanted} where it has {size}"
                raise ShapeMismatch(what, other_kind=axis > 0)
    return symbols
