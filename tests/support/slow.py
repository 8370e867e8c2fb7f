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
