"""Texts without what is personal: home, library, names of the user and the machine, logins and secrets."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECRETS = ("HYBRID_TRT_FARM_TOKEN", "HYBRID_TRT_FLEET_KEY", "RAY_AUTH_TOKEN")
"""Variables of the environment with secrets of the pack or of the farm: their values are told nowhere."""
SHORTEST_SECRET = 8
NOT_PERSONAL = {"root", "localhost", "comfyui"}
SHORTEST_NAME = 3
"""Shorter user names are parts of sentences; in paths they go with the home folder."""
_LOGIN = r"((?<=://)[^\s/\"']+|(?<![\w/])[\w.+-]+:[^\s/\"'@]+)@(\[[^\s\]]*\]|[\w.-]*)"
"""Name and password before the host of an address, and that host."""


def hider(libraries: Sequence[Path]) -> Callable[[Any], Any]:
    """Return a function that takes what is personal out of a text, or out of all texts of some data."""
    words = [(re.compile(pattern, re.IGNORECASE), word) for pattern, word in _personal(libraries)]

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: hide(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [hide(one) for one in value]
        if isinstance(value, str):
            for pattern, word in words:
                value = pattern.sub(word, value)
        return value

    return hide


def _personal(libraries: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield patterns, and the words that stand in their place: longer ones before their parts."""
    for name in SECRETS:
        if len(secret := os.environ.get(name, "").strip()) >= SHORTEST_SECRET:
            yield re.escape(secret), "<secret>"
    yield _LOGIN, "<login>@<host>"
    home, host = os.path.expanduser("~"), socket.gethostname()
    folders = {home: "~"} | {str(folder): f"<library {n}>" for n, folder in enumerate(libraries, 1)}
    known = {spelt(folder): word for folder, word in folders.items() for spelt in (os.path.abspath, os.path.realpath)}
    for folder in sorted(known, key=len, reverse=True):
        if len(Path(folder).parts) > 1:  # a disk's own folder says nothing
            parts = map(re.escape, re.split(r"[\\/]+", folder))  # backslashes may be doubled
            yield r"[\\/]+".join(parts) + r"(?![\w-])", known[folder]
    names = {host: "<host>", host.partition(".")[0]: "<host>", Path(home).name: "<user>", _user(): "<user>"}
    for name, word in names.items():
        if len(name) >= SHORTEST_NAME and name.lower() not in NOT_PERSONAL:
            yield rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # nobody knows this user's number
        return ""
