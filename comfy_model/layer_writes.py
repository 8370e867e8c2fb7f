"""Number of attributes that anybody has set or deleted on any layer so far.

torch does both for all layers in two methods, which count here. So a single number shows that nobody wrote to any
layer, however many there are. Writing to a layer's dicts directly is not counted.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

_numbers = itertools.count(1)
_set, _delete = torch.nn.Module.__setattr__, torch.nn.Module.__delattr__
_latest = 0


def _counted_set(self: torch.nn.Module, name: str, value: Any) -> None:
    global _latest
    _set(self, name, value)
    _latest = next(_numbers)  # after the write: a reader of the number sees the attribute


def _counted_delete(self: torch.nn.Module, name: str) -> None:
    global _latest
    _delete(self, name)
    _latest = next(_numbers)


def count_writes() -> None:
    """Have torch count from now on; once is enough."""
    if torch.nn.Module.__setattr__ is _set and torch.nn.Module.__delattr__ is _delete:
        torch.nn.Module.__setattr__, torch.nn.Module.__delattr__ = _counted_set, _counted_delete


def writes() -> int:
    """Return the number; a new number in each call where another pack replaced the counting methods."""
    if torch.nn.Module.__setattr__ is _counted_set and torch.nn.Module.__delattr__ is _counted_delete:
        return _latest
    return next(_numbers)
