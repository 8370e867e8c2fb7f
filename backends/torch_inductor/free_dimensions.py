"""Dimensions of a call that are left free while it is traced and compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

Place = tuple[int, int]
"""The number of an input, and one of its dimensions."""


class FreeDimensions:
    """The dimensions that a kind leaves free: their size differs from run to run."""

    def __init__(self, calls: Sequence[Sequence[torch.Tensor]]):
        """
        Args:
            calls: the inputs of each call of one block. Its code is compiled for the first call.
        """
        self.fixed: dict[Place, int] = {}
        self.alike: list[tuple[Place, Place]] = []
        self.free: dict[str, Place] = {}
        self._groups: dict[tuple[int, ...], Place] = {}
        self._axes: dict[int, set[int]] = {}
        for number, tensor in enumerate(calls[0]):
            for axis in range(tensor.ndim):
                self._sort((number, axis), tuple(call[number].shape[axis] for call in calls))
        if len({sizes[0] for sizes in self._groups}) < len(self._groups):
            raise ValueError(f"sizes that differ are alike in the call to compile for: {list(self._groups)}")
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment)

    def _sort(self, place: Place, sizes: tuple[int, ...]) -> None:
        if len(set(sizes)) == 1:
            self.fixed[place] = sizes[0]
            return
        self._axes.setdefault(place[0], set()).add(place[1])
        if sizes in self._groups:
            self.alike.append((self._groups[sizes], place))
        self._groups.setdefault(sizes, place)

    def examples(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Weights and inputs as fake tensors; dimensions of one size share a symbol."""
        found = [self._fake(tensor, set()) for tensor in weights]
        for number, tensor in enumerate(inputs):
            axes = self._axes.get(number, set())
            fake = self._fake(tensor, axes)
            self.free |= {str(fake.shape[axis]): (number, axis) for axis in axes}
            found.append(fake)
        return found

    def _fake(self, tensor: torch.Tensor, free: set[int]) -> torch.Tensor:
        sizes = [DimDynamic.DUCK if axis in free else DimDynamic.STATIC for axis in range(tensor.ndim)]
        return self._mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    @contextmanager
    def known_to_inductor(self) -> Iterator[None]:
        """Inside, Inductor knows the examples' sizes as free."""
        with torch._guards.tracing(torch._guards.TracingContext(self._mode)):
            yield

    @property
    def conditions(self) -> list:
        """All that trace and Inductor have taken for granted about the sizes."""
        return list(dict.fromkeys(guard.expr for guard in self._environment.guards))
