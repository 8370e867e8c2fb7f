"""A ControlNet's hint, encoded once per image and not in every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..architectures.tensors import ShapeMismatch, bind
from ..engine_library import Reason, Unavailable
from ..engine_library.native import NativeNetwork
from ..live_torch.network import laid_out
from ..live_torch.weights import LiveWeights

KEPT = 4


@dataclass
class _Entry:
    hint: weakref.ref[torch.Tensor]
    written: int | None
    weights: int
    encoded: torch.Tensor


class HintCache:
    """Remembers what became of the latest hints.

    ComfyUI makes one tensor per image and size and hands the same object to every step, so the object is the key: while
    it lives nobody else has its place, and in-place changes show in its version (where torch counts one).
    """

    def __init__(self, encode: Callable[[torch.Tensor], torch.Tensor]):
        self._encode = encode
        self._entries: list[_Entry] = []
        self.encoded = 0

    def get(self, hint: torch.Tensor, weights: int) -> torch.Tensor:
        """The encoded hint.

        Args:
            weights: version of the weights; another one encodes anew.
        """
        written = None if hint.is_inference() else hint._version
        for entry in self._entries:
            if entry.hint() is hint and entry.written == written and entry.weights == weights:
                return entry.encoded
        self._entries = [e for e in self._entries if e.weights == weights and _lives_on(e, hint)]
        encoded = self._encode(hint)
        self.encoded += 1
        self._entries = [*self._entries[1 - KEPT :], _Entry(weakref.ref(hint), written, weights, encoded)]
        return encoded

    def clear(self) -> None:
        self._entries.clear()


class HintEncoder:
    """The first layers of a ControlNet, those that depend on the hint alone, run by torch from its live weights.

    An engine has the rest: it takes what these layers make of the hint, and nobody computes it in every step.
    """

    def __init__(self, network: NativeNetwork, precision: str):
        """
        Raises:
            ReplacedForward: another node replaced a part of the network.
        """
        self._network = network
        self._dtype = getattr(torch, precision)
        self._weights = LiveWeights(network, self._dtype, share=False)
        self._encoder = network.architecture().hint_encoder(self._weights.module)
        self._weights.only(self._encoder)
        self._cache = HintCache(self._encode)
        self._spec = [spec for spec in network.architecture().inputs(network.module, precision) if spec.name == "hint"]

    def release(self) -> None:
        """Give weights and results back; the next call takes them anew."""
        self._cache.clear()
        self._weights.release()

    def __call__(self, hint: torch.Tensor) -> torch.Tensor:
        """What the engine takes in the place of a hint of shape (1 or B, channels, 8H, 8W): (1 or B, features, H, W).

        Raises:
            Unavailable: the hint has another form, or there is no memory to encode it.
        """
        try:
            self._weights.follow(self._network.patcher)  # cheap, as long as its patches are those of the last call
            return self._cache.get(hint, self._weights.version)
        except torch.OutOfMemoryError as error:
            raise Unavailable(Reason.ENGINE_FAILED, "there is no memory to encode the control image") from error

    def _encode(self, hint: torch.Tensor) -> torch.Tensor:
        try:
            bind(self._spec, {"hint": tuple(hint.shape)})
            return self._encoder(laid_out(hint.to(self._network.device, self._dtype))).contiguous()
        except ShapeMismatch as error:
            raise Unavailable(Reason.UNSUPPORTED_INPUT, str(error)) from None


def _lives_on(entry: _Entry, replaced: torch.Tensor) -> bool:
    hint = entry.hint()
    return hint is not None and hint is not replaced
