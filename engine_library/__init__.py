"""Engines on disk: their descriptions (manifest), their folders (library), and reasons against their use (fallback)."""

from .disk import LibraryError
from .engine import Engine
from .fallback import BuildError, Fallback, Reason, Unavailable, ValidationFailed
from .library import EngineQuery, Library
from .manifest import EngineIdentity, Manifest

__all__ = [
    "BuildError",
    "Engine",
    "EngineIdentity",
    "Fallback",
    "Library",
    "LibraryError",
    "Manifest",
    "Reason",
    "ValidationFailed",
    "Unavailable",
    "EngineQuery",
]
