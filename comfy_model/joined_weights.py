"""The live weights of a network: of one patcher, or of the patchers of the two networks that one engine computes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ..architectures.fused_linear import FusedLinear
from .live_weights import LiveWeights
from .network import NativeNetwork, patchers_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def live_weights(network: NativeNetwork, dtype: torch.dtype, share: bool = True) -> LiveWeights | JoinedWeights:
    """Return the live weights of a network."""
    return (LiveWeights if network.companion is None else JoinedWeights)(network, dtype, share)


class JoinedWeights:
    """Live weights of a network with a companion. Methods take the patcher of the network itself.

    It leads to the companion's patcher: ComfyUI keeps that in the model patch of the sampled model.
    """

    def __init__(self, network: NativeNetwork, dtype: torch.dtype, share: bool = True):
        self._parts = [LiveWeights(part, dtype, share) for part in network.parts]
        self._companion = weakref.ref(network.companion.module)
        self.module = type(network.module)(*(part.module for part in self._parts)).eval()

    @property
    def generation(self) -> int:
        return sum(part.generation for part in self._parts)

    @property
    def version(self) -> int:
        return sum(part.version for part in self._parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self._parts)

    @property
    def most_bytes(self) -> int:
        return sum(part.most_bytes for part in self._parts)

    @property
    def loaded(self) -> bool:
        return all(part.loaded for part in self._parts)

    def only(self, part: torch.nn.Module) -> None:
        """Follow the parameters of a part of ``module`` alone."""
        for own in self._parts:
            own.only(part)

    def forget(self, layers: Collection[torch.nn.Module]) -> None:
        """Follow the parameters of these layers no longer."""
        for own in self._parts:
            own.forget(layers)

    def fuse(self, layers: Sequence[FusedLinear]) -> None:
        """Keep the parameters of fused layers in one tensor each."""
        for own in self._parts:
            its = set(own.module.modules())
            own.fuse([one for one in layers if one.layers[0] in its])

    def sync_from(self, patcher: ModelPatcher, thorough: bool = True) -> None:
        """Set the weights to a patcher's values, and its model patch's.

        Raises:
            Unavailable: it has no such patch.
        """
        for part, own in zip(self._parts, self._patchers(patcher), strict=True):
            part.sync_from(own, thorough)

    def missing(self, patcher: ModelPatcher) -> int:
        """Bytes that ``sync_from`` would allocate for owned weights."""
        return sum(part.missing(own) for part, own in zip(self._parts, self._patchers(patcher), strict=True))

    def release(self) -> None:
        """Give the owned memory back and let go of shared tensors."""
        for part in self._parts:
            part.release()

    def _patchers(self, patcher: ModelPatcher) -> tuple[ModelPatcher, ...]:
        return patchers_of(patcher, self._companion())
