"""A ControlNet's hint, encoded once per image and not in every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

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


def _lives_on(entry: _Entry, replaced: torch.Tensor) -> bool:
    hint = entry.hint()
    return hint is not None and hint is not replaced
