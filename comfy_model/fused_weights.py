"""The parameters of fused layers, on live weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..architectures.fused_linear import FusedLinear


class FusedWeights:
    """A parameter of fused layers, on live weights.

    Attributes:
        names: of the layers' parameters, in order.
    """

    def __init__(self, fused: FusedLinear, leaf: str, names: Sequence[str]):
        self.names = list(names)
        self._fused, self._leaf = fused, leaf
        self._rows = [getattr(layer, leaf).shape[0] for layer in fused.layers]
        self._whole: torch.Tensor | None = None
        self._lent = False

    def own(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return where a layer's parameter is to be written."""
        if self._whole is None:
            shape = (sum(self._rows), *getattr(self._fused.layers[0], self._leaf).shape[1:])
            self._whole = torch.empty(shape, dtype=dtype, device=device)
        return self._parts()[self.names.index(name)]

    def keep(self) -> None:
        """Stop sharing storage with native parameters."""
        if self._lent:
            self.release()

    def lend(self, places: Sequence[tuple[torch.nn.Module, str]]) -> None:
        """Make native parameters at these places views of one tensor, so that there is one copy of them.

        Where ComfyUI has replaced a parameter, a new tensor is made: ComfyUI may restore parts of the old tensor.
        """
        live = [owner._parameters[leaf].data for owner, leaf in places]
        if self._lent and all(a.data_ptr() == b.data_ptr() for a, b in zip(live, self._parts(), strict=True)):
            return
        self._whole, self._lent = torch.cat(live), True
        for (owner, leaf), part in zip(places, self._parts(), strict=True):
            owner._parameters[leaf] = torch.nn.Parameter(part, requires_grad=False)

    def place(self) -> None:
        """Let the fused layers compute with the tensor."""
        self._fused._parameters[self._leaf] = torch.nn.Parameter(self._whole, requires_grad=False)

    def release(self) -> None:
        """Let go of the tensor."""
        nothing = torch.empty_like(self._fused._parameters[self._leaf], device="meta")
        self._whole, self._lent = None, False
        self._fused._parameters[self._leaf] = torch.nn.Parameter(nothing, requires_grad=False)

    def _parts(self) -> Sequence[torch.Tensor]:
        return self._whole.split(self._rows)
