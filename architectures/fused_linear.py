"""Linear layers that take the same input, computed as one: fewer and larger matrix products."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F


class FusedLinear(torch.nn.Module):
    """Layers whose weights are joined in a tensor; the first ``Part`` that is called in a pass computes all.

    Attributes:
        layers: the layers, which compute no longer themselves; their parameters are views of joined parameters.
        weight: (sum of the layers' features out, features in).
        bias: (sum of the layers' features out,), or None.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear], first: torch.nn.Module | None = None):
        """
        Args:
            layers: with the same features in, all with a bias or none.
            first: computed before the layers, once.
        """
        super().__init__()
        self.layers = tuple(layers)  # a tuple: they are no submodules of this one
        self.first = first
        for leaf in ("weight", "bias"):
            parts = [getattr(layer, leaf) for layer in layers]
            whole = None if parts[0] is None else torch.cat([part.data for part in parts])
            self.register_parameter(leaf, None if whole is None else torch.nn.Parameter(whole, requires_grad=False))
        self._widths = [layer.out_features for layer in layers]
        self._given: weakref.ref[torch.Tensor] | None = None
        self._results: list[torch.Tensor | None] = []

    @property
    def leaves(self) -> list[str]:
        """Names of its parameters."""
        return list(self._parameters) if self.bias is not None else ["weight"]

    def forward(self, index: int, given: torch.Tensor) -> torch.Tensor:
        """Return the result of a layer.

        A result that was taken before belongs to an earlier pass, even for the same tensor: the tensor may have been
        written since.
        """
        if self._given is None or self._given() is not given or self._results[index] is None:
            ready = given if self.first is None else self.first(given)
            weight, bias = self.weight.to(ready.dtype), None if self.bias is None else self.bias.to(ready.dtype)
            self._results = list(F.linear(ready, weight, bias).split(self._widths, dim=-1))
            self._given = weakref.ref(given)
        result, self._results[index] = self._results[index], None
        if not any(left is not None for left in self._results):
            self._given = None
        return result


class Part(torch.nn.Module):
    """Replaces a fused layer."""

    def __init__(self, fused: FusedLinear, index: int):
        super().__init__()
        self._whole = (fused,)  # a tuple: it is registered once, elsewhere
        self._index = index

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self._whole[0](self._index, given)


Child = tuple[torch.nn.Module, str]
"""A module and a child's name."""


def fuse(module: torch.nn.Module, groups: Sequence[Sequence[Child]]) -> list[FusedLinear]:
    """Fuse the layers of each group. ``module`` is a copy that nobody else uses.

    Groups with quantised layers, with layers that multiply in fp8, or with weights of several dtypes, stay as they are.

    Args:
        groups: ``Linear``s, or ``Sequential``s that end with a ``Linear`` and are alike before it.
    """
    from .quantised_linear import multiplies_in_fp8

    made = []
    for children in groups:
        found = [owner.get_submodule(leaf) for owner, leaf in children]
        before = [layer[:-1] if isinstance(layer, torch.nn.Sequential) else None for layer in found]
        linears = [layer[-1] if isinstance(layer, torch.nn.Sequential) else layer for layer in found]
        plain = all(isinstance(layer, torch.nn.Linear) and not multiplies_in_fp8(layer) for layer in linears)
        if not plain or len({layer.weight.dtype for layer in linears}) > 1:
            continue
        fused = FusedLinear(linears, before[0])
        for index, (owner, leaf) in enumerate(children):
            setattr(owner, leaf, Part(fused, index))
        made.append(fused)
    module.fused = torch.nn.ModuleList(made)
    return made
