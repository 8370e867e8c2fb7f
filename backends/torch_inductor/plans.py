"""Consequences of the shapes of a call's inputs, worked out once for each set of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...architectures import Architecture
from ...architectures.calls import UncoveredCall, file_sizes, lacking_words
from ...architectures.shapes import ShapeMismatch, TensorSpec, bind
from ...engine_library import Reason, Unavailable
from ...sessions.session import misfit
from .network import Sizes, frozen

MOST = 256
"""Sets of shapes that are remembered."""


@dataclass(frozen=True)
class Plan:
    """A call's sizes; ``sizes`` are those of its compiled file, ``uncovered`` is the call where there is none."""

    symbols: dict[str, int]
    sizes: Sizes
    uncovered: UncoveredCall


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
        sizes, words = frozen(file_sizes(self._architecture, symbols)), lacking_words(self._architecture, symbols)
        return Plan(symbols, sizes, UncoveredCall(frozen(symbols), words, self._ran))
