"""Weights hashes on disk, by the file that a model was loaded from: a 7 GB checkpoint is hashed once, not every start.

They serve models that ComfyUI's own loaders made and nobody patched; other models are hashed when needed. Once per
process a thread reads the whole file: its digest shows whether the file was changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine_library import Engine, Fallback, Reason, trust
from ..engine_library.safe_files import NOTES, read_json, write_file
from .weight_patches import version_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

log = logging.getLogger(__name__)

FILE_NAME = ".weights_hashes.json"
MAX_ENTRIES = 1024

_folder: Path | None = None
_lock = threading.Lock()


def use(folder: Path | None) -> None:
    """Keep the hashes in this folder; None keeps none."""
    global _folder
    _folder = folder


def source_of(patcher: ModelPatcher) -> dict | None:
    """Return the file that a model was loaded from (``path``, ``size``, ``mtime_ns``), or None when it is not known."""
    loader = getattr(patcher, "cached_patcher_init", None)
    path = loader[1][0] if loader and loader[1] else None
    return _on_disk(os.path.realpath(path)) if isinstance(path, str) else None


def _on_disk(path: str) -> dict | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return {"path": path, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def key_of(patcher: ModelPatcher, prefix: str, sample: Callable[[], str]) -> str | None:
    """Return the key of a model's hash: its file, loader, options and dtypes; None when it must be hashed.

    Args:
        sample: a quick hash of some weights: a file may be replaced by another with the same size and time.
    """
    source = source_of(patcher)
    if source is None or version_of(patcher) is not None:
        return None
    state = state_of(source["path"])
    loader, arguments = patcher.cached_patcher_init[:2]
    options = repr(arguments[1:])
    if " at 0x" in options:
        return None  # an object without a name: after a restart it may be another object
    dtypes = sorted({str(p.dtype) for p in patcher.model.parameters()})
    return json.dumps([source, state, loader.__name__, options, prefix, dtypes, sample()])


def read(key: str | None) -> str | None:
    """Return the hash kept under a key, or None, and begin to read the key's whole file for ``still_holds``."""
    found = _entries().get(key) if key is not None else None
    if found is not None:
        digest_of(_path_in(key))
    return found


def write(key: str | None, value: str) -> None:
    """Keep a hash. A library that cannot be written costs time only, so that is no error."""
    if key is None:
        return
    _change(lambda entries: entries.update({key: value}))
    if _folder is not None:
        digest_of(_path_in(key)).add_done_callback(lambda digest: _keep_digest(key, digest.result()))


def _keep_digest(key: str, digest: str) -> None:
    """Keep the digest of a key's file, unless reading it failed."""
    if digest:
        _change(lambda entries: entries.update({_file_key(key): digest}))


def still_holds(key: str | None) -> bool:
    """Compare the file's digest with the one stored with its hash.

    Waits until the file has been read. A hash without a stored digest holds from now on.
    """
    if key is None or _folder is None:
        return True
    digest, kept = digest_of(_path_in(key)).result(), _entries().get(_file_key(key))
    if kept is None:
        _keep_digest(key, digest)
    if kept is None or digest == kept:
        return True
    log.warning("Hybrid TRT: %s was changed without a sign of it; its weights are hashed anew", _path_in(key))
    forget(key)
    return False


def _path_in(key: str) -> str:
    return json.loads(key)[0]["path"]


def _file_key(key: str) -> str:
    """Return the key of the digest of a key's file."""
    return "file " + json.dumps(json.loads(key)[:2])


def forget(key: str | None) -> None:
    """Drop the hash kept under a key."""
    if read(key) is not None:
        _change(lambda entries: (entries.pop(key, None), entries.pop(_file_key(key), None)))


def known_hashes(source: dict) -> set[str]:
    """Return the hashes of all models that were loaded from a file in its present state."""
    start = json.dumps([source])[:-1]
    return {value for key, value in _entries().items() if key.startswith(start)}


def hashes_without_patches(patcher: ModelPatcher) -> set[str]:
    """Hashes of the unpatched file: a patched model never has them. Empty for an unpatched model."""
    source = None if version_of(patcher) is None else source_of(patcher)
    return set() if source is None else known_hashes(source)


def _entries() -> dict[str, str]:
    if _folder is None:
        return {}
    try:
        entries = read_json(_folder / FILE_NAME, NOTES)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in entries.items() if isinstance(value, str)} if isinstance(entries, dict) else {}


def _change(change: Callable[[dict[str, str]], object]) -> None:
    if _folder is None:
        return
    with _lock:
        try:
            entries = _entries()
            change(entries)
            kept = dict(list(entries.items())[-MAX_ENTRIES:])
            _folder.mkdir(parents=True, exist_ok=True)
            write_file(_folder / FILE_NAME, json.dumps(kept, indent=0))
        except OSError as error:
            log.debug("Hybrid TRT: the hash of a model's weights was not kept (%s)", error)


def source_changed(engine: Engine) -> Fallback | None:
    """Return a reason if the file of an engine's weights has been overwritten; a missing file proves nothing.

    Return None for an engine of any weights, and for an engine of another worker: its file has other times there.
    Only paths of engines that were built here are touched: a path that a stranger wrote may lead to his server.
    """
    record, source = trust.record_of(engine), engine.manifest.source
    if record is None or record.verdict != trust.BUILT or not record.here or engine.manifest.identity.any_weights:
        return None
    now = _on_disk(source.get("path", ""))
    if now is None or now == dict(source) or engine.manifest.identity.weights in known_hashes(now):
        return None
    if known_hashes(dict(source)) & known_hashes(now):
        return None  # the same contents with another time; the engine has a LoRA in it, so its hash is of no file
    return Fallback(Reason.STALE_ENGINE, f"{now['path']} has changed since this engine was built from it")


BLOCK = 1 << 22

_digests: dict[str, Future[str]] = {}
_starting = threading.Lock()


def state_of(path: str) -> tuple | None:
    """Return the size, times and inode of a file, which change with it; None where they cannot be read."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def digest_of(path: str) -> Future[str]:
    """Read a file in a thread and return its digest; ``""`` where reading fails, or the file changes meanwhile."""
    key = f"{path} {state_of(path)}"
    with _starting:
        if key not in _digests:
            _digests[key] = found = Future()
            # a daemon: a server that stops does not wait for the thread
            threading.Thread(target=_read, args=(path, found), name="Hybrid TRT file digest", daemon=True).start()
        return _digests[key]


def _read(path: str, found: Future[str]) -> None:
    before, total = state_of(path), hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK):
                total.update(block)
    except OSError as error:
        log.debug("Hybrid TRT: %s could not be read as a whole (%s)", path, error)
        before = None
    found.set_result(total.hexdigest() if before is not None and state_of(path) == before else "")
