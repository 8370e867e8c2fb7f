"""Contents that were hashed on this machine: an engine of gigabytes is read once to be trusted, not at every start.

Kept beside this machine's secret, where only this user writes. A file counts as unchanged while its size, its times and
its inode are the same; the time of the last change (``ctime``) cannot be set back, on Windows it is that of the making.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from . import local_key, schema
from .atomic_files import write_file
from .engine import Check, Engine

MAX_KEPT = 1000

_here: dict[str, list] = {}
"""What this process knows, by the engine's folder."""


def check_contents(engine: Engine, check: Check | None = None) -> None:
    """Hash an engine's files unless that was done on this machine and they have not changed since.

    Raises:
        Unavailable: they are not those that were built.
    """
    before = _state(engine)
    if before == _here.get(str(engine.folder)) or before == _read(engine):
        _here[str(engine.folder)] = before
        return
    engine.check_contents(check)
    if _state(engine) == before:
        remember(engine)


def remember(engine: Engine) -> None:
    """The files have the hashes of the manifest: whoever calls this has just written or read them."""
    state = _here[str(engine.folder)] = _state(engine)
    with contextlib.suppress(OSError):  # costs time only
        path = _path(engine)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(state))
        kept = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-MAX_KEPT]:
            old.unlink()


def _state(engine: Engine) -> list:
    """Which hashes are expected of which files in which state, as JSON gives it back."""
    state: list = [engine.manifest.digest]
    for name in engine.manifest.files:
        try:
            stat = (engine.folder / name).stat()
        except OSError:
            return [*state, name]
        state.append([name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev])
    return state


def _read(engine: Engine) -> list | None:
    try:
        return schema.loads(_path(engine).read_bytes())
    except (OSError, schema.MalformedInput):
        return None


def _path(engine: Engine) -> Path:
    name = hashlib.sha256(str(engine.folder.absolute()).encode(errors="replace")).hexdigest()[:40]
    return local_key.folder() / "verified" / f"{name}.json"
