"""Cases that show nearly what others show in less time: CI leaves them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

SLOW = pytest.mark.slow


def cases(every: Mapping[str, Any], slow: Collection[str]) -> list[Any]:
    """Parameters by name, some of them marked slow; a tuple is several arguments."""
    assert set(slow) <= set(every), "a name that no case has"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name, marks=[SLOW] * (name in slow))
        for name, case in every.items()
    ]


def when(name: str) -> pytest.MarkDecorator:
    """Marks a test slow where a fixture's parameter has this name."""
    return pytest.mark.slow_when(name)


def mark(items: Collection[pytest.Item]) -> None:
    """Give the cases that ``when`` names their mark, before pytest chooses."""
    for item in items:
        for marker in item.iter_markers("slow_when"):
            if marker.args[0] in item.callspec.id.split("-"):
                item.add_marker(SLOW)
