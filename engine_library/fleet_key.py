"""The fleet key: a secret that all workers of a fleet mount. Each accepts what another built and checked.

It adds to each machine's own secret, see ``trust``. A holder of the key can run programs on every worker.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path

from .safe_files import is_private, open_regular

log = logging.getLogger(__name__)

VARIABLE = "HYBRID_TRT_FLEET_KEY"
SHORTEST, LONGEST = 32, 4096
"""Bytes of a key."""
_FEWEST_KINDS = 8
"""Least number of different bytes in a key: everybody knows the file of zeros that a failed copy leaves."""


def sign(text: str) -> str:
    """Return the signature of a text with the fleet key; ``""`` without one."""
    key = _key()
    return "" if key is None else digest(key, text)


def is_signed(text: str, signature: object) -> bool:
    """Tell whether a worker with the same fleet key signed a text."""
    return matches(_key(), text, signature)


def why_refused() -> str:
    """Return why the file that is named is not used as a key; ``""`` where it is, or where none is named."""
    path = _path()
    return "" if path is None else _read(path)[1]


def in_use() -> bool:
    """Tell whether this process signs with a fleet key, and accepts signatures of it."""
    return _key() is not None


def stamp() -> tuple | None:
    """Return a value that changes when the key does, or who may read it; None where there is none."""
    path = _path()
    try:
        found = None if path is None else path.lstat()
    except (OSError, ValueError):
        return None
    return None if found is None else (str(path), found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


def make(path: Path) -> None:
    """Write a new key that only this user may read.

    Raises:
        OSError: there is such a file already, or it cannot be written.
    """
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(SHORTEST))


def _path() -> Path | None:
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def _key() -> bytes | None:
    path = _path()
    if path is None:
        return None
    key, why = _read(path)
    if key is None:
        _warn(why)
    return key


def _read(path: Path) -> tuple[bytes | None, str]:
    """Return the key, or why there is none. Never with the path: a user may have put the key itself there."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            key, private = file.read(LONGEST + 1), is_private(file.fileno(), path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no path"
        return None, f"the file that {VARIABLE} names cannot be read ({why})"
    if not private:
        return None, f"the file that {VARIABLE} names may be read by other users, or is another user's"
    if not SHORTEST <= len(key) <= LONGEST or len(set(key)) < _FEWEST_KINDS:
        return None, f"the file that {VARIABLE} names is no key of {SHORTEST} to {LONGEST} random bytes"
    return key, ""


def digest(key: bytes, text: str) -> str:
    """Return the signature of a text with any key."""
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def matches(key: bytes | None, text: str, signature: object) -> bool:
    """Tell whether a signature of a text was made with a key; False without a key."""
    return key is not None and isinstance(signature, str) and hmac.compare_digest(
        signature.encode("utf-8", "replace"), digest(key, text).encode()
    )  # fmt: skip


@functools.cache
def _warn(why: str) -> None:
    log.warning(
        "Hybrid TRT: %s, so there is no fleet key: engines of other workers are not used, and are built here; let it "
        "name a regular file with mode 0600 that belongs to this user", why,
    )  # fmt: skip
