"""The run side: engines from the library serve a sampler's calls, or native serves and the stats say why.

It knows architectures, backends and the library, never the nodes.
"""

from __future__ import annotations

from typing import Any


class NotCopied:
    """Is its own deep copy: sessions, graphs and streams exist once, and copies of their holders share them."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> NotCopied:
        return self
