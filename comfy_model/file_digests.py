"""Digests of whole model files, read beside everything else, once per file and process."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

log = logging.getLogger(__name__)

BLOCK = 1 << 22

_digests: dict[str, Future[str]] = {}
_starting = threading.Lock()


def state_of(path: str) -> tuple | None:
    """The size, times and inode of a file, which change with it; None where they cannot be read."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def digest_of(path: str) -> Future[str]:
    """The digest of a file as it is now, being read in a thread of its own; ``""`` where that fails or it changes."""
    key = f"{path} {state_of(path)}"
    with _starting:
        if key not in _digests:
            _digests[key] = found = Future()
            # a daemon: a server that stops does not wait for it
            threading.Thread(target=_read, args=(path, found), name="Hybrid TRT file digest", daemon=True).start()
        return _digests[key]


def when_known(digest: Future[str], then: Callable[[str], object]) -> None:
    """Call ``then`` with a digest, unless there is none."""
    digest.add_done_callback(lambda done: then(done.result()) if done.result() else None)


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
