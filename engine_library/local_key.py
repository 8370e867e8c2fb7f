"""A secret of this user on this machine. It signs what was made or checked here, and nobody else can."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from .atomic_files import claim, replace, temporary_beside

FOLDER_VARIABLE = "HYBRID_TRT_KEY_FOLDER"
LENGTH = 32


def folder() -> Path:
    """Where the secret lies.

    Raises:
        OSError: this user has no home, and the variable names no folder.
    """
    if named := os.environ.get(FOLDER_VARIABLE) or os.environ.get("XDG_CONFIG_HOME"):
        return Path(named) / "hybrid-trt"
    try:
        return Path.home() / ".config" / "hybrid-trt"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def sign(text: str) -> str:
    """The signature of a text; makes the secret when there is none.

    Raises:
        OSError: there is no secret and none can be kept.
    """
    return _digest(_read() or _make(), text)


def is_signed(text: str, signature: object) -> bool:
    """Whether a signature of a text was made here."""
    key = _read()
    return key is not None and isinstance(signature, str) and hmac.compare_digest(signature, _digest(key, text))


def stamp() -> tuple[int, int] | None:
    """Changes when the secret does; None where there is none."""
    try:
        stat = _path().stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size) if stat.st_size == LENGTH else None


def _path() -> Path:
    return folder() / "local.key"


def _digest(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _read() -> bytes | None:
    """The secret, if it is whole: an empty or cut file is a secret that everybody knows."""
    try:
        with _path().open("rb") as file:
            key = file.read(LENGTH + 1)
    except OSError:
        return None
    return key if len(key) == LENGTH else None


def _make() -> bytes:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(LENGTH))
        if path.exists() and _read() is None:
            replace(temporary, path)
        else:
            _claim(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    if (key := _read()) is None:  # another process may have been first: then it is theirs
        raise OSError(f"{path} cannot be kept")
    return key


def _claim(temporary: Path, path: Path) -> None:
    try:
        claim(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # no links on this disk
        replace(temporary, path)
