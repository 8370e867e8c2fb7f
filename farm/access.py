"""The farm's token: everyone who renders has it, and Ray keeps only its hash."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

VARIABLE = "HYBRID_TRT_FARM_TOKEN"
_SHORTEST = 16


class NoToken(Exception):
    """No usable token; the text says what to do."""


def token_file() -> Path:
    """Return the default file of the token."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hybrid-trt" / "farm_token"


def token(file: Path | None, make: bool = False) -> str:
    """Return the token of a file, else of the variable, else of the usual file.

    Args:
        make: write a new token to the usual file where there is none.

    Raises:
        NoToken: it is missing or too short.
    """
    if file is None and os.environ.get(VARIABLE):
        return _checked(os.environ[VARIABLE], VARIABLE)
    found = file or token_file()
    if make and file is None and not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        fresh = found.with_name(f".{found.name}-{os.getpid()}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_urlsafe(32))
        fresh.replace(found)
    try:
        return _checked(found.read_text(encoding="utf-8"), str(found))
    except (OSError, UnicodeDecodeError) as error:
        raise NoToken(f"The token cannot be read ({error}): set {VARIABLE}, or use --token-file.") from None


def digest(text: str) -> str:
    """Return the hash by which the farm knows a token."""
    return hashlib.sha256(text.encode()).hexdigest()


def admits(header: str | None, wanted: str) -> bool:
    """Tell whether a request's ``Authorization`` header has the token of this hash, in constant time."""
    kind, _, given = (header or "").partition(" ")
    return hmac.compare_digest(digest(given.strip()), wanted) and kind.lower() == "bearer"


def _checked(text: str, where: str) -> str:
    if len(text.strip()) < _SHORTEST:
        raise NoToken(f"The token of {where} is shorter than {_SHORTEST} characters: write a longer one.")
    return text.strip()
