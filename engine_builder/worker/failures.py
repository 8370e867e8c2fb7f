"""What a child tells of its failure."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor

from ...engine_library import BuildError, Unavailable, ValidationFailed

WORDS = ("out of memory", "alloc_failed", "bad_alloc", "brokenprocesspool", "terminated abruptly", "killed signal")
"""How libraries, compilers and pools of processes say that memory lacked, theirs or that of one of their helpers."""


def in_json(error: Exception) -> dict:
    """A failure for the server: its ``kind`` and ``text``, and whether it is ``crowded``."""
    crowded = {"crowded": is_crowded(error)}
    if isinstance(error, BuildError):
        return {"kind": "refuted" if isinstance(error, ValidationFailed) else "build", "text": str(error), **crowded}
    if isinstance(error, Unavailable):
        return {"kind": "unavailable", "reason": error.fallback.reason.value, "text": error.fallback.detail, **crowded}
    return {"kind": "error", "text": _one_line(error), "errno": getattr(error, "errno", None), **crowded}


def is_crowded(error: BaseException) -> bool:
    """Whether a task may have failed for what others had meanwhile: memory, or on Windows an open file of a cache."""
    return any(
        isinstance(cause, MemoryError | BrokenExecutor | PermissionError | FileExistsError)
        or any(words in f"{type(cause).__name__} {cause}".lower() for words in WORDS)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came of, the latest first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
