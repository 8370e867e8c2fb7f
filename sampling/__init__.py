"""The run side: engines from the library serve a sampler's calls, or native serves and the stats say why.

It knows architectures, backends and the library, never the nodes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class NotCopied:
    """Has itself as its deep copy: sessions, graphs and streams exist once, and copies of their holders share them."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> NotCopied:
        return self


class InPlaceOfNative:
    """Takes the place of a native network in ComfyUI's objects: other attributes, and deep copies, are the network's.

    Attributes:
        native: the network.
    """

    native: torch.nn.Module

    def __getattr__(self, name: str) -> Any:
        if "native" not in vars(self):  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.native, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return copy.deepcopy(self.native, memo)  # for another GPU; a patcher's copy loads it
