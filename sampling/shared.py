"""Objects that exist once: deep copies of conditionings and models, which other packs make, share them."""

from __future__ import annotations

from typing import Any


class Shared:
    """Is its own deep copy: sessions, graphs and streams exist once, and who copies what holds them shares them."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Shared:
        return self
