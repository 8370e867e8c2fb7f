"""Engines on disk: what they are (manifest), whose they are (weights), where they are (library)."""

from .disk import LibraryError
from .library import Engine, Library, Wanted
from .manifest import EngineIdentity, Manifest
from .reasons import Fallback, Reason, Unavailable
from .weight_patches import WeightPatches

__all__ = [
    "Engine",
    "EngineIdentity",
    "Fallback",
    "Library",
    "LibraryError",
    "Manifest",
    "Reason",
    "Unavailable",
    "Wanted",
    "WeightPatches",
]
