"""Engines on disk: what they are (manifest), where they are (library), and why one cannot be used (reasons)."""

from .disk import LibraryError
from .engine import Engine
from .library import Library, Wanted
from .manifest import EngineIdentity, Manifest
from .reasons import BuildError, Fallback, Reason, Refuted, Unavailable

__all__ = [
    "BuildError",
    "Engine",
    "EngineIdentity",
    "Fallback",
    "Library",
    "LibraryError",
    "Manifest",
    "Reason",
    "Refuted",
    "Unavailable",
    "Wanted",
]
