"""Engines on disk: what they are (manifest), whose they are (weights), where they are (library)."""

from .library import Engine, Library, Wanted
from .manifest import EngineIdentity, Manifest
from .reasons import Fallback, Reason, Unavailable

__all__ = ["Engine", "EngineIdentity", "Fallback", "Library", "Manifest", "Reason", "Unavailable", "Wanted"]
