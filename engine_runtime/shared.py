"""What other packs must not get a second one of: their deep copies of conditionings and models hold engines too."""

from __future__ import annotations

from typing import Any


class Shared:
    """Is its own deep copy: sessions, graphs and streams exist once, and who copies what holds them shares them."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Shared:
        return self
