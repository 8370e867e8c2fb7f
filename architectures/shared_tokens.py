"""Tokens of a call that several GPUs share: each computes some of the picture's, and all of the prompt's.

A transformer computes each token by itself, but for attention. There a GPU needs keys and values of the other GPUs'
tokens, see ``user_attention.gathering``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .shapes import Dim, TensorSpec


@dataclass(frozen=True)
class SharedTokens:
    """Division of a family's tokens.

    Attributes:
        symbols: the sizes of which one is divided: image tokens, or rows or columns of them.
        front, back: numbers of tokens that attention has before the picture's and behind them, as the prompt's. All
            GPUs compute these. ``front`` is None where a call does not tell it, and all attention is the picture's.
        alone: whether some layers attend to the picture's tokens alone, although there are others beside them.
        masked: a size that is 0 in calls without a mask in attention, if the family has masks. Others are not shared.
    """

    symbols: str
    front: tuple[Dim, ...] | None = ()
    back: tuple[Dim, ...] = ()
    alone: bool = False
    masked: str = ""

    def beside(self, sizes: Mapping[str, int]) -> tuple[int | None, set[int]]:
        """Return the tokens before the picture's in a call, and numbers of tokens beside it in its attention."""
        if self.front is None:
            return None, set()
        front, back = (sum(dim.size(sizes) for dim in dims if dim.symbols <= sizes.keys())  # a network may lack some
                       for dims in (self.front, self.back))  # fmt: skip
        return front, {front + back, 0} if self.alone else {front + back}

    def symbol(self, sizes: Mapping[str, int], count: int) -> str:
        """Return the size that so many GPUs divide most evenly; two divide 15 rows into 7 and 8."""
        return min(self.symbols, key=lambda symbol: -(-sizes[symbol] // count) / sizes[symbol])

    def tokens(self, outputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
        """Return the picture's tokens in a call: those of the first result."""
        return next(dim.size(sizes) for dim in outputs[0].dims
                    if isinstance(dim, Dim) and not dim.symbols.isdisjoint(self.symbols))  # fmt: skip


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """Return the beginning and size of each share, nearly equal."""
    ends = [size * number // count for number in range(count + 1)]
    return [(begin, end - begin) for begin, end in zip(ends, ends[1:], strict=False)]


def taken(
    specs: Sequence[TensorSpec], given: Mapping[str, torch.Tensor], sizes: Mapping[str, int], symbol: str, begin: int,
    size: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return one share of a call's tensors.

    Args:
        sizes: of the whole call.
    """
    found = dict(given)
    for spec, axis, factors, at in _divided(specs, symbol):
        if (whole := found.get(spec.name)) is not None:
            parts, each = whole.unflatten(axis, [factor.size(sizes) for factor in factors]), factors[at].up
            found[spec.name] = parts.narrow(axis + at, begin * each, size * each).flatten(axis, axis + len(factors) - 1)
    return found


def put_together(
    specs: Sequence[TensorSpec], parts: Sequence[Mapping[str, torch.Tensor]], sizes: Sequence[Mapping[str, int]],
    symbol: str,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return the results of a call from those of all shares, on the device of the first; the inverse of ``taken``.

    Args:
        sizes: of each share.
    """
    found = dict(parts[0])
    for spec, axis, factors, at in _divided(specs, symbol):
        own = [
            part[spec.name].to(found[spec.name].device).unflatten(axis, [factor.size(each) for factor in factors])
            for part, each in zip(parts, sizes, strict=True)
        ]
        found[spec.name] = torch.cat(own, axis + at).flatten(axis, axis + len(factors) - 1)
    return found


def _divided(specs: Sequence[TensorSpec], symbol: str) -> Iterator[tuple[TensorSpec, int, list[Dim], int]]:
    """Yield the dimensions that are divided: the tensor, the axis, its factors, and which of them it is."""
    for spec in specs:
        for axis, dim in enumerate(spec.dims):
            if isinstance(dim, Dim) and symbol in dim.symbols:
                factors = list(_factors(dim))
                yield spec, axis, factors, [factor.symbol for factor in factors].index(symbol)


def _factors(dim: Dim) -> Iterator[Dim]:
    yield Dim(dim.symbol, dim.up, dim.down, None, dim.plus)
    if dim.times is not None:
        yield from _factors(dim.times)
