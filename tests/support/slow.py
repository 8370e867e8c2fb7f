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


def when(name: str, but: Collection[str] = ()) -> pytest.MarkDecorator:
    """Marks a test slow where one of its parameters has this name, but for those where another has one of ``but``."""
    return pytest.mark.slow_when(name, *but)


def mark(items: Collection[pytest.Item]) -> None:
    """Give the cases that ``when`` names their mark, before pytest chooses."""
    for item in items:
        for marker in item.iter_markers("slow_when"):
            (name, *but), parameters = marker.args, item.callspec.id.split("-")
            if name in parameters and not set(but) & set(parameters):
                item.add_marker(SLOW)
