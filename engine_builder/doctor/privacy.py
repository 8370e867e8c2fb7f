"""Texts without personal data: known folders get names; other paths, secrets, logins and names are taken out."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SECRETS = ("HYBRID_TRT_FARM_TOKEN", "HYBRID_TRT_FLEET_KEY", "RAY_AUTH_TOKEN")
"""Variables of the environment with secrets of the pack or of the farm: no report has their values."""
SHORTEST_SECRET = 8
NOT_PERSONAL = {"", "root", "localhost", "comfyui"}
SHORTEST_NAME = 3
"""Shorter user names may be parts of words; in paths they go with the home folder."""

_INNER = ("~", "<temporary>")
"""Folders inside of which names are personal too."""
_SCHEME = r"(?:[a-z]+:/{2,}(?=/[^/\s]|[A-Za-z]:[\\/]))?"
_START = rf"{_SCHEME}(?:(?:{'|'.join(_INNER)})[\\/]+|/(?=[^\s/])|[A-Za-z]:[\\/]+|\\\\+(?=\w))"
_INSIDE = r"[^\\/\n\"'<>|]"
_PATH = re.compile(rf"(?<![\w~>./\\-]){_START}(?:{_INSIDE}*[^\\/\s\"'<>|(=,;:][\\/]+)*[^\\/\s\"'<>|(),;:]*")
"""A path that no quotes hold: folders may have spaces inside their names, and the last part ends at the first one."""
_QUOTED = re.compile(rf"(?P<quote>[\"'`]){_START}[^\n]*?(?P=quote)")
_LOGIN = re.compile(r"(?:(?<=://)[^\s/\"']+|(?<![\w/])[\w.+-]+:[^\s/\"'@]+)@(?:\[[^\s\]]*\]|[\w.-]*)")
"""Name and password before the host of an address, and that host."""
_FILE = re.compile(r"[^\\/]*\.\w[^\\/]*")


def hider(places: Mapping[str, Path | None]) -> Callable[[Any], Any]:
    """Return a function that takes personal data out of a text, or out of all texts of some data.

    Args:
        places: replacement words -> folder; the home folder is known.
    """
    known = sorted(set(_known({**places, "~": _home()})), key=lambda pair: (-len(pair[0]), pair))
    patterns = [(_as_pattern(path), word) for path, word in known]
    secrets = [one for name in SECRETS if len(one := os.environ.get(name, "").strip()) >= SHORTEST_SECRET]
    names = [(re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE), word)
             for word, found in (("<host>", _host_names()), ("<user>", _user_names())) for name in found]  # fmt: skip

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: hide(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [hide(one) for one in value]
        if not isinstance(value, str):
            return value
        for secret in secrets:
            value = value.replace(secret, "<secret>")
        value = _LOGIN.sub("<login>@<host>", value)
        for pattern, word in patterns:
            value = pattern.sub(lambda _, word=word: word, value)
        value = _QUOTED.sub(lambda found: f"{found['quote']}{_short(found[0][1:-1])}{found['quote']}", value)
        value = _PATH.sub(lambda found: _short(found[0]), value)
        for name, word in names:
            value = name.sub(word, value)
        return value

    return hide


def _known(places: Mapping[str, Path | None]) -> Iterator[tuple[str, str]]:
    for word, place in places.items():
        for path in {place, _resolved(place)} - {None}:
            if len(path.parts) > 1:  # a disk's own folder says nothing
                yield str(path), word


def _resolved(path: Path | None) -> Path | None:
    try:
        return None if path is None else path.resolve()
    except (OSError, RuntimeError):  # a ring of links
        return None


def _as_pattern(path: str) -> re.Pattern[str]:
    """Return a pattern that finds a path in a text, also with doubled backslashes."""
    parts = [re.escape(part) for part in re.split(r"[\\/]+", path)]
    return re.compile(r"[\\/]+".join(parts) + r"(?![\w-])", re.IGNORECASE)


def _short(path: str) -> str:
    """Return a path without its folders; a last part that may be a folder goes too."""
    first, *_, last = re.split(r"[\\/]", path.rstrip("\\/"))
    begin = f"{first}/..." if first in _INNER else "<path>"
    return f"{begin}/{last}" if _FILE.fullmatch(last) else begin


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def _user_names() -> set[str]:
    found = {os.environ.get(name, "") for name in ("USER", "USERNAME", "LOGNAME")}
    home = _home()
    found.add("" if home is None else home.name)
    try:
        found.add(getpass.getuser())
    except (OSError, KeyError, ImportError):  # nobody knows this user's number
        pass
    return _personal(found)


def _host_names() -> list[str]:
    """Return this machine's names, the longest first."""
    name = socket.gethostname()
    return sorted(_personal({name, name.partition(".")[0]}), key=len, reverse=True)


def _personal(names: set[str]) -> set[str]:
    return {name for name in names if name.lower() not in NOT_PERSONAL and len(name) >= SHORTEST_NAME}
