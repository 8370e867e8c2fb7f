"""Messages of a live client: its first one, and changes of settings. Errors in them are sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engine_library import schema
from ..engine_library.schema import MalformedInput
from ..streaming.frames import Changes
from ..streaming.live import given
from ..streaming.pictures import FORMATS

MAX_TEXT = 64 << 10
MAX_PROMPT = 10_000
_UNSHOWN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that prompts may not have; line ends are allowed."""


@dataclass(frozen=True)
class Hello:
    """First message of a client: the token of the session, and the form that it wants pictures in."""

    token: str
    format: str


def read_hello(text: str) -> Hello:
    """Read the first message: {"token": ..., "format": "jpeg", "png" or "raw"}.

    Raises:
        MalformedInput: it is another message.
    """
    data = schema.mapping(_loads(text), "the first message", ("token",), ("format",))
    kind = schema.one_of(data.get("format", "jpeg"), "format", FORMATS)
    return Hello(schema.text(data["token"], "token", 100), kind)


def read_message(text: str, now: Changes) -> Changes | None:
    """Read a later message: settings by name, or {"stop": true}, which is None. ``now`` has the present settings.

    Raises:
        MalformedInput: a value is wrong, or its setting cannot be changed here.
    """
    data = schema.mapping(_loads(text), "the message", (), (*_READ, "stop"))
    if "stop" in data:
        if data["stop"] is not True or len(data) > 1:
            raise MalformedInput("stop is true, and comes alone")
        return None
    return Changes(**{name: _read(name, value, given(now)) for name, value in data.items()})


def _loads(text: str) -> Any:
    if len(text) > MAX_TEXT:
        raise MalformedInput(f"it has more than {MAX_TEXT} characters")
    return schema.loads(text)


def _read(name: str, value: object, now: Mapping[str, Any]) -> Any:
    if name not in now:
        raise MalformedInput(_FIXED.get(name, f"{name} cannot be changed on this TRT Stream"))
    read = _READ[name](value, name)
    if name == "strengths" and len(read) != len(now["strengths"]):
        raise MalformedInput(f"strengths has {len(read)} numbers, and this stream has {len(now['strengths'])}")
    return read


def _prompt(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_PROMPT or _UNSHOWN.search(value):
        raise MalformedInput(f"{what} is no text of at most {MAX_PROMPT} characters")
    return value


_NO_CLIP = "a prompt needs a text encoder: connect CLIP to TRT Stream"
_FIXED = {"prompt": _NO_CLIP, "negative": _NO_CLIP}
_READ: dict[str, Callable[[object, str], Any]] = {
    "prompt": _prompt,
    "negative": _prompt,
    "strengths": lambda value, what: tuple(
        schema.sequence(value, what, 16, lambda one, name: float(schema.number(one, name, 0, 10)))
    ),
    "seed": lambda value, what: schema.integer(value, what, 0, (1 << 64) - 1),
    "steps": lambda value, what: schema.integer(value, what, 1, 8),
    "denoise": lambda value, what: float(schema.number(value, what, 0, 1)),
    "cfg": lambda value, what: float(schema.number(value, what, 0, 30)),
}
