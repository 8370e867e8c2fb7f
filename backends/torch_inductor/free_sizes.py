"""Sizes that a compiled file leaves free: one file then serves prompts of any length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ...architectures.shapes import Range, TensorSpec
from ...engine_library import BuildError

Size = int | str
"""A number, or a sum of products of free sizes by their names in a trace."""


@dataclass(frozen=True)
class Traced:
    """The free sizes of a traced network as plain data, for a process that compiles a part of it.

    Attributes:
        served: symbol -> the sizes that the file has to serve.
        names: name in the trace -> symbol and the size that the trace was made with.
    """

    served: Mapping[str, Range]
    names: Mapping[str, tuple[str, int]]


class FreeSizes:
    """The free sizes of one file, while it is made."""

    def __init__(self, specs: Sequence[TensorSpec], served: Mapping[str, Range]):
        """
        Args:
            specs: the inputs, in order. Where a size follows from a free symbol it is that symbol's.
            served: symbol -> the sizes that the file has to serve.
        """
        self._specs = specs
        self._served = served
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment)
        self._names: dict[str, str] = {}
        self._hints: dict[str, int] = {}

    def traced(self) -> Traced:
        """Return what another process needs to make the same sizes free: see ``FreeSizesOfPart``."""
        return Traced(dict(self._served), {name: (symbol, self._hints[name]) for name, symbol in self._names.items()})

    def examples(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Weights and inputs as fake tensors with free sizes, which a symbol's inputs share.

        Inputs of other sizes than each other's are told apart by these, so no two free symbols may be of one size.
        """
        found = [self._fake(tensor, ()) for tensor in weights]
        for tensor, spec in zip(inputs, self._specs, strict=True):
            axes = {i: d.symbol for i, d in enumerate(spec.dims) if not isinstance(d, int) and d.symbol in self._served}
            fake = self._fake(tensor, axes)
            self._names |= {str(fake.shape[axis]): symbol for axis, symbol in axes.items()}
            self._hints |= {str(fake.shape[axis]): tensor.shape[axis] for axis in axes}
            found.append(fake)
        return found

    def _fake(self, tensor: torch.Tensor, free: Collection[int]) -> torch.Tensor:
        sizes = [DimDynamic.DUCK if axis in free else DimDynamic.STATIC for axis in range(tensor.ndim)]
        return self._mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    @contextmanager
    def known_to_inductor(self) -> Iterator[None]:
        """Inside, Inductor knows the examples' sizes as free."""
        with torch._guards.tracing(torch._guards.TracingContext(self._mode)):
            yield

    def check(self) -> None:
        """Raise BuildError where the trace, or Inductor, has taken for granted what not all sizes are.

        Nothing is asked when a file is called: so what was taken for granted has to hold for all sizes that it serves.
        """
        if sorted(self._names.values()) != sorted(self._served):
            raise BuildError(f"the sizes {', '.join(self._served)} could not be left free (became {self._names})")
        sizes = [(served.min, served.min + 1, served.opt, served.max - 1, served.max)
                 for served in map(self._served.get, self._names.values())]  # fmt: skip
        for guard in self._environment.guards:
            names = {str(symbol): symbol for symbol in guard.expr.free_symbols}
            for case in itertools.product(*sizes):
                values = {names[name]: size for name, size in zip(self._names, case, strict=True) if name in names}
                if guard.expr.subs(values) != True:  # noqa: E712, sympy's own
                    told = ", ".join(f"{self._names[str(symbol)]} {size}" for symbol, size in values.items())
                    raise BuildError(f"Inductor compiled for sizes with {guard.expr}, which {told} has not")


class FreeSizesOfPart(FreeSizes):
    """Those of a part, in the process that compiles it."""

    def __init__(self, traced: Traced):
        super().__init__((), traced.served)
        self.mode = self._mode
        self._sizes: dict[str, torch.SymInt] = {}
        for name, (symbol, size) in traced.names.items():
            self._sizes[name] = self._fake(torch.empty(size, device="meta"), (0,)).shape[0]
            self._names[str(self._sizes[name])] = symbol

    def size(self, size: Size) -> int | torch.SymInt:
        """Return a size of the trace as one of this process."""
        if isinstance(size, int):
            return size
        total: int | torch.SymInt = 0
        for term in sympy.Add.make_args(sympy.sympify(size)):
            factors = map(str, sympy.Mul.make_args(term))
            total += math.prod(self._sizes[name] if name in self._sizes else int(name) for name in factors)
        return total


def told(size: int | torch.SymInt) -> Size:
    """Return a size of a trace as plain data.

    Raises:
        ValueError: it is no sum of products.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    factors = [factor for term in sympy.Add.make_args(expression) for factor in sympy.Mul.make_args(term)]
    if not all(factor.is_Symbol or factor.is_Integer for factor in factors):
        raise ValueError(f"a size is {expression}")
    return int(expression) if expression.is_Integer else str(expression)
