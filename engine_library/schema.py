"""Reading of untrusted JSON: every value has its form, or a ``MalformedInput`` names the value that has not.

Values that cannot be shown are refused: NUL, lone surrogates, NaN, numbers that overflow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

Value = TypeVar("Value")

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_FORBIDDEN = set('<>:"/\\|?*')
_PORTS = "123456789\u00b9\u00b2\u00b3"
_DEVICES = {"con", "prn", "aux", "nul", "conin$", "conout$", *(f"{kind}{n}" for kind in ("com", "lpt") for n in _PORTS)}


class MalformedInput(ValueError):
    """A value of another form than it has to be; the text names it."""


DEEPEST = 100
"""Most levels of lists and objects: far fewer than Python's own functions can follow."""


def loads(text: bytes | str) -> Any:
    """JSON as the standard has it: no NaN, no number beyond all floats, nothing nested beyond reason.

    Raises:
        MalformedInput: it is none.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except ValueError as error:
        raise MalformedInput(f"it is no JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise MalformedInput(f"it is nested more than {DEEPEST} levels deep") from None
    _check_depth(value)
    return value


def loads_whole(text: bytes | str) -> Any:
    """Return JSON as ``loads`` does, for text that is written or sent back: lone surrogates are refused too.

    Raises:
        MalformedInput: it is none.
    """
    value = loads(text)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedInput("it has half a character (a lone surrogate), which cannot be written anywhere") from None
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise MalformedInput(f"it is nested more than {DEEPEST} levels deep")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is larger than any number of JSON here")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def mapping(value: object, what: str, needed: Collection[str] = (), known: Collection[str] = ()) -> Mapping[str, Any]:
    """A JSON object with all of ``needed``, and with nothing but these and ``known``."""
    if not isinstance(value, dict):
        raise MalformedInput(f"{what} is no object")
    if missing := sorted(set(needed) - value.keys()):
        raise MalformedInput(f"{what} has no {missing[0]}")
    if unknown := sorted(value.keys() - set(needed) - set(known)):
        raise MalformedInput(f"{what} has {shown(unknown[0])}, which is unknown")
    return value


def table(
    value: object, what: str, most: int, name: Callable[[str], bool], read: Callable[[object, str], Value]
) -> dict[str, Value]:
    """A JSON object of up to ``most`` values of one kind under names of one kind."""
    if not isinstance(value, dict) or len(value) > most:
        raise MalformedInput(f"{what} is no object of at most {most} entries")
    for key in value:
        if not name(key):
            raise MalformedInput(f"{what} has {shown(key)}, which is no name there")
    return {key: read(entry, f"{what}.{key}") for key, entry in value.items()}


def strings(value: object, what: str) -> Mapping[str, str]:
    """A JSON object of strings."""
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        raise MalformedInput(f"{what} is no object of strings")
    return value


def sequence(value: object, what: str, most: int, read: Callable[[object, str], Value]) -> list[Value]:
    """A JSON array of up to ``most`` values of one kind."""
    if not isinstance(value, list) or len(value) > most:
        raise MalformedInput(f"{what} is no list of at most {most} entries")
    return [read(entry, f"{what}[{number}]") for number, entry in enumerate(value)]


def text(value: object, what: str, most: int = 500) -> str:
    """A string that can be shown and written anywhere."""
    if not isinstance(value, str) or len(value) > most or _CONTROL.search(value):
        raise MalformedInput(f"{what} is no plain text of at most {most} characters")
    return value


def word(value: object, what: str) -> str:
    """A string that can be a part of a file's name."""
    if not isinstance(value, str) or not WORD.fullmatch(value):
        raise MalformedInput(f"{what} is {shown(value)}, which is no name")
    return value


def one_of(value: object, what: str, allowed: Collection[str]) -> str:
    """One of some strings."""
    if not isinstance(value, str) or value not in allowed:
        raise MalformedInput(f"{what} is {shown(value)}, which is none of {', '.join(allowed)}")
    return value


def integer(value: object, what: str, least: int = 0, most: int = 1 << 53) -> int:
    """A whole number in a range; by default JavaScript holds it exactly."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise MalformedInput(f"{what} is {shown(value)}, which is no whole number from {least} to {most}")
    return value


def number(value: object, what: str, least: float = 0.0, most: float = 1e15) -> float:
    """A finite number in a range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise MalformedInput(f"{what} is {shown(value)}, which is no number from {least:g} to {most:g}")
    return value


def plain(value: object, what: str, depth: int = 4) -> Any:
    """Any JSON of a few levels whose numbers are finite and whose texts are plain."""
    if isinstance(value, dict | list) and depth == 0:
        raise MalformedInput(f"{what} is nested too deeply")
    if isinstance(value, dict):
        return {text(k, f"a name in {what}", 100): plain(v, f"{what}.{k}", depth - 1) for k, v in value.items()}
    if isinstance(value, list):
        return sequence(value, what, 1000, lambda v, w: plain(v, w, depth - 1))
    if isinstance(value, str):
        return text(value, what)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not (math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 53):
            raise MalformedInput(f"{what} is {shown(value)}, which is no number that can be kept")
    return value


def plain_name(name: str) -> bool:
    """Tell whether a text can be a file's name on every system: no path, no device, nothing that Windows cuts."""
    return (
        0 < len(name) <= 200
        and not _CONTROL.search(name)
        and not set(name) & _FORBIDDEN
        and name == name.rstrip(". ")
        and name.split(".")[0].rstrip().lower() not in _DEVICES
    )


def printable(value: str) -> str:
    """A text with what cannot be shown replaced."""
    return _CONTROL.sub("?", value)


def shown(value: object) -> str:
    """A value for an error's text, cut short."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a huge number"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return ascii(value)[:80]
