"""When an engine was last used: the time of an empty file in its folder, so that nothing is read or locked to tell."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from .engine import Engine
from .manifest import USE_NAME

EVERY = 60.0
"""Seconds in which more than one use counts as one."""

_marked: dict[Path, float] = {}


def mark(engines: Iterable[Engine]) -> None:
    """Engines serve now. Microseconds; a library that cannot be written keeps no record."""
    now = time.monotonic()
    for engine in engines:
        path = engine.folder / USE_NAME
        # one that was deleted and came back within that time has no record yet
        if now - _marked.get(engine.folder, -EVERY) < EVERY and path.exists():
            continue
        _marked[engine.folder] = now
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
            os.utime(path)


def last_used(engine: Engine) -> datetime | None:
    """When an engine was last used, or None when that is not known."""
    try:
        return datetime.fromtimestamp((engine.folder / USE_NAME).stat().st_mtime, timezone.utc)
    except (OSError, ValueError, OverflowError):
        return None
