"""Consequences of the shapes of a call's inputs, worked out once for each set of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...architectures import Architecture
from ...architectures.calls import ANY_SIZE, UncoveredCall, is_compiled
from ...architectures.shapes import ShapeMismatch, TensorSpec, bind
from ...engine_library import Reason, Unavailable
from ...sessions.session import misfit

MOST = 256
"""Sets of shapes that are remembered."""


@dataclass(frozen=True)
class Plan:
    """A call's sizes, and whether compiled blocks serve it: ``uncovered`` is the call where these are not there."""

    symbols: dict[str, int]
    compiled: bool
    uncovered: UncoveredCall | None


class Plans:
    """The plans of a network."""

    def __init__(self, architecture: Architecture, inputs: Sequence[TensorSpec], device: torch.device):
        self._architecture, self._inputs = architecture, inputs
        self._names = {spec.name for spec in inputs}
        self._ran = "graph" if device.type == "cuda" else "eager"
        self._known: dict[tuple, Plan] = {}

    def of(self, given: Mapping[str, torch.Tensor]) -> Plan:
        """Return the plan of a call.

        Raises:
            Unavailable: the network takes no such inputs.
        """
        key = tuple((name, tensor.shape) for name, tensor in given.items())
        if key not in self._known:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = self._made(given)
        return self._known[key]

    def _made(self, given: Mapping[str, torch.Tensor]) -> Plan:
        try:
            symbols = bind(self._inputs, {name: tuple(tensor.shape) for name, tensor in given.items()})
        except ShapeMismatch as error:
            raise misfit(error) from None
        if unknown := given.keys() - self._names:
            raise Unavailable(Reason.UNSUPPORTED_INPUT, f"the network has no input {sorted(unknown)[0]}")
        compiled = is_compiled(self._architecture, symbols)
        uncovered = UncoveredCall(frozenset(symbols.items()), ANY_SIZE, self._ran)
        return Plan(symbols, compiled, uncovered if compiled else None)
