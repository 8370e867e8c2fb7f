"""The parameters of joined layers, one after another in one tensor, of which each layer's own is a view."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..architectures.fused_linear import FusedLinear


class FusedWeights:
    """One of the parameters of joined layers, on live weights.

    Attributes:
        names: of the layers' parameters, in order.
    """

    def __init__(self, joined: FusedLinear, leaf: str, names: Sequence[str]):
        self.names = list(names)
        self._joined, self._leaf = joined, leaf
        self._rows = [getattr(layer, leaf).shape[0] for layer in joined.layers]
        self._whole: torch.Tensor | None = None
        self._lent = False

    def own(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return where a layer's parameter is to be written."""
        if self._whole is None:
            shape = (sum(self._rows), *getattr(self._joined.layers[0], self._leaf).shape[1:])
            self._whole = torch.empty(shape, dtype=dtype, device=device)
        return self._parts()[self.names.index(name)]

    def keep(self) -> None:
        """The tensor is for our own values from now on: nobody else's may be views of it."""
        if self._lent:
            self.release()

    def lend(self, places: Sequence[tuple[torch.nn.Module, str]]) -> None:
        """Let native parameters at these places be views, so that there is one copy of them.

        Where ComfyUI has put other tensors in their place a new tensor is made: it may put parts of the old one back.
        """
        live = [owner._parameters[leaf].data for owner, leaf in places]
        if self._lent and all(a.data_ptr() == b.data_ptr() for a, b in zip(live, self._parts(), strict=True)):
            return
        self._whole, self._lent = torch.cat(live), True
        for (owner, leaf), part in zip(places, self._parts(), strict=True):
            owner._parameters[leaf] = torch.nn.Parameter(part, requires_grad=False)

    def place(self) -> None:
        """Let the joined layers compute with what was written or lent."""
        self._joined._parameters[self._leaf] = torch.nn.Parameter(self._whole, requires_grad=False)

    def release(self) -> None:
        """Let go of the tensor."""
        nothing = torch.empty_like(self._joined._parameters[self._leaf], device="meta")
        self._whole, self._lent = None, False
        self._joined._parameters[self._leaf] = torch.nn.Parameter(nothing, requires_grad=False)

    def _parts(self) -> Sequence[torch.Tensor]:
        return self._whole.split(self._rows)
