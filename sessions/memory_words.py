"""Words by which torch, ONNX Runtime, TensorRT and C++ say that memory was short."""

from __future__ import annotations

import errno

_PHRASES = (
    "out of memory", "outofmemory", "no room for the engine", "can't allocate memory", "cannot allocate memory",
    "failed to allocate memory", "bad_alloc", "bad allocation", "alloc_failed",
)  # fmt: skip


def says_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory was short; most libraries only say so in words."""
    words = f"{type(error).__name__} {error}".lower()
    short = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return short or any(phrase in words for phrase in _PHRASES)
