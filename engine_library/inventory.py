"""Contents of the library: each engine's state (ready, stale, unchecked, broken), the reason, and its last use."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from .disk import LibraryError, readable
from .engine import Check, Engine
from .fallback import Fallback, Reason, Unavailable
from .library import Library, Usable, manifests
from .manifest import USE_NAME, Manifest, ManifestError
from .safe_files import open_regular

log = logging.getLogger(__name__)

READY, STALE, UNCHECKED, BROKEN = "ready", "stale", "unchecked", "broken"

MARK_EVERY = 60.0
"""Seconds in which several uses are marked once."""

_marked: dict[Path, float] = {}


@dataclass(frozen=True)
class Entry:
    """One folder of the library.

    Attributes:
        name: the folder's name; ``name@2`` if an earlier folder of the library has the same.
        state: ``"ready"``; ``"stale"``: of another version, machine, GPU or file; ``"unchecked"``: it was built without
            this GPU and was not compared with native on it; ``"broken"``: its files are damaged, or it is wrong.
        reason: why it is not ready, in words.
        bytes: what the folder takes on disk.
        engine: None when its manifest cannot be read.
        last_used: when it was used, in UTC as ISO 8601; None when that is not known.
    """

    folder: Path
    name: str
    state: str
    reason: str
    bytes: int
    engine: Engine | None
    last_used: str | None = None

    def to_json(self) -> dict:
        """Return it for ``--json`` and the page."""
        data = {"folder": str(self.folder), "name": self.name, "state": self.state, "reason": self.reason,
                "bytes": self.bytes, "last_used": self.last_used}  # fmt: skip
        if self.engine is not None:
            manifest = self.engine.manifest.to_json()
            names = ("key", "label", "kind", "identity", "created", "seconds", "parity")
            data |= {name: manifest[name] for name in names}
        return data


Stale = Callable[[Engine], Fallback | None]
"""Returns why an engine's weights no longer match their file, or None: see ``hash_cache.source_changed``."""


def entries(library: Library, usable: Usable, stale: Stale, gpu: str = "") -> list[Entry]:
    """List everything in the library, in a stable order.

    Args:
        usable: returns why an engine does not run here (version, GPU), by its backend; None means that it runs.
        gpu: where they are to run; ``""`` is the CPU.
    """
    found: dict[str, Entry] = {}
    for root in library.roots:
        for path in manifests(root):
            name = _free_name(path.parent.name, found)
            found[name] = _entry(path, name, usable, stale, gpu)
    return list(found.values())


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return a folder's name, with a number if it is taken: a user must not delete the wrong engine by its name."""
    numbered = (f"{name}@{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


def _entry(path: Path, name: str, usable: Usable, stale: Stale, gpu: str) -> Entry:
    folder, engine = path.parent, None
    try:
        engine = Engine(folder, Manifest.read(path))
        fault = Library.why_unusable(engine, usable, gpu) or stale(engine)
    except ManifestError as error:
        fault = Fallback(Reason.BROKEN_ENGINE, str(error))
    except Exception as error:  # of a backend, for example; the other engines are listed all the same
        log.warning("Hybrid TRT: %s could not be looked at, so it is listed as broken.", folder, exc_info=True)
        what = f"{folder.name} could not be looked at ({type(error).__name__}: {error}); the log has the whole error"
        fault = Fallback(Reason.BROKEN_ENGINE, what)
    state = READY if fault is None else fault.reason.state if fault.reason.state in (BROKEN, UNCHECKED) else STALE
    used = last_used(engine) if engine is not None else None
    text = used.isoformat(timespec="seconds") if used is not None else None
    return Entry(folder, name, state, "" if fault is None else str(fault), _disk_use(folder), engine, text)


def _disk_use(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # deleted since it was listed
                total += os.stat(os.path.join(where, name)).st_size
    return total


def select(found: list[Entry], name: str) -> Entry:
    """Return the entry that a user means by its name, the start of it, or the start of its key.

    Raises:
        LibraryError: none, or several.
    """
    exact = [e for e in found if e.name == name]
    alike = exact or [e for e in found if e.name.startswith(name) or _key(e).startswith(name)]
    if name and len(alike) == 1:
        return alike[0]
    if not alike or not name:
        raise LibraryError(f"no engine is called {name!r}; 'list' shows them all")
    raise LibraryError(f"{name!r} could be any of {', '.join(e.name for e in alike)}; write more of its name")


def _key(entry: Entry) -> str:
    return entry.engine.manifest.identity.key if entry.engine is not None else ""


def verify(entry: Entry, check: Check | None = None) -> Fallback | None:
    """Read and hash all files of an engine; return what is wrong with them, or None."""
    if entry.engine is None:
        return Fallback(Reason.BROKEN_ENGINE, entry.reason)
    try:
        entry.engine.check_sizes()
        entry.engine.check_contents(check)
    except Unavailable as broken:
        return broken.fallback
    except OSError as error:
        return Fallback(Reason.BROKEN_ENGINE, f"{entry.name} cannot be read ({error})")
    return None


def delete(entry: Entry) -> None:
    """Remove an engine's folder.

    Raises:
        LibraryError: the library cannot be written, or the engine is in use on a system that protects open files.
    """
    try:
        Library.remove(entry.folder)
    except OSError as error:
        raise readable(error, entry.folder.parent) from error


def mark_used(engines: Iterable[Engine]) -> None:
    """Note in the time of an empty file that engines serve now. A read-only library keeps no note."""
    now = time.monotonic()
    for engine in engines:
        path = engine.folder / USE_NAME
        # an engine that was deleted and came back within that time has no record yet
        if now - _marked.get(engine.folder, -MARK_EVERY) < MARK_EVERY and path.exists():
            continue
        _marked[engine.folder] = now
        with contextlib.suppress(OSError):
            os.close(open_regular(path, os.O_WRONLY | os.O_CREAT))
            os.utime(path)


def last_used(engine: Engine) -> datetime | None:
    """Return when an engine was last used, or None when that is not known."""
    try:
        return datetime.fromtimestamp((engine.folder / USE_NAME).stat().st_mtime, timezone.utc)
    except (OSError, ValueError, OverflowError):
        return None
