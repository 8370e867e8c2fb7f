"""One network run from its live weights: plainly, or by a compiled file where one fits the call's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..architectures import Architecture
from ..architectures.tensors import TensorSpec
from ..engine_library.native import NativeNetwork
from .compiled import Compiled, best_attention
from .weights import LiveWeights

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

Symbols = frozenset
"""The sizes of a call: a frozenset of (symbol, size)."""


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the memory layout that networks compute in: channels_last on a GPU, where that is faster."""
    if tensor.ndim == 4 and tensor.is_cuda:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


class LiveNetwork:
    """A plain copy of a native network over its live weights, as a function of named tensors.

    Attributes:
        inputs, outputs: its tensors, in order; the hint comes encoded (see ``Architecture.hint_encoder``).
        weights: where the parameters come from.
    """

    def __init__(self, network: NativeNetwork, architecture: Architecture, precision: str):
        self.dtype = getattr(torch, precision)
        self.device = network.device
        self.inputs: list[TensorSpec] = architecture.encoded_inputs(network.module, precision)
        self.outputs: list[TensorSpec] = architecture.outputs(network.module, precision)
        # a ControlNet's own patcher is replaced by the engine's, so nobody loads native weights to share
        self.weights = LiveWeights(network, self.dtype, share=network.kind == "unet")
        copy = self.weights.module
        self._encoder = architecture.hint_encoder(copy)
        self.function = architecture.function(copy)
        # sorted: in which order a layer registers its parameters depends on how ComfyUI loaded them
        self.names = sorted(name for name, _ in self.function.named_parameters())
        self._compiled: dict[Symbols, Compiled] = {}
        self._flat: list[torch.Tensor] = []
        self._flat_of = -1

    def follow(self, patcher: ModelPatcher, thorough: bool = True) -> None:
        """Make the weights those of a patcher; see ``LiveWeights.follow``."""
        self.weights.follow(patcher, thorough)

    def release(self) -> None:
        """Give the weights' memory back; the next ``follow`` starts anew."""
        self.weights.release()
        self._flat = []

    def flat_weights(self) -> list[torch.Tensor]:
        """The weights in the order of ``names``."""
        if self._flat_of != self.weights.generation:
            parameters = dict(self.function.named_parameters())
            self._flat = [parameters[name].data for name in self.names]
            self._flat_of = self.weights.generation
        return self._flat

    def add_compiled(self, symbols: Mapping[str, int], compiled: Compiled) -> None:
        """Use ``compiled`` for calls of exactly these sizes."""
        self._compiled[frozenset(symbols.items())] = compiled

    def forget_compiled(self) -> None:
        self._compiled.clear()

    def has_compiled(self, symbols: Mapping[str, int]) -> bool:
        """Whether calls of these sizes run compiled."""
        return frozenset(symbols.items()) in self._compiled

    def encode_hint(self, hint: torch.Tensor) -> torch.Tensor:
        """What stands for the hint among the inputs; depends on nothing but the hint and the weights."""
        hint = laid_out(hint.to(self.device, self.dtype))
        return laid_out(self._encoder(hint))

    def run(self, inputs: Mapping[str, torch.Tensor], symbols: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """One call on tensors of the right dtype, device and layout; output name -> tensor."""
        given = [inputs[spec.name] for spec in self.inputs]
        compiled = self._compiled.get(frozenset(symbols.items()))
        with best_attention(self.device):
            results = compiled(*self.flat_weights(), *given) if compiled else self.function(*given)
        return {spec.name: result for spec, result in zip(self.outputs, results, strict=True)}
