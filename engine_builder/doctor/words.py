"""The report as plain text: a line for each fact, indented below its heading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

INDENT = "  "


def as_text(report: Mapping[str, Any]) -> str:
    """Return a report as text that can be pasted anywhere."""
    return "\n".join(_lines(report, ""))


def _lines(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, one in value.items():
        if isinstance(one, Mapping | list):
            yield f"{indent}{name}:" if one else f"{indent}{name}: none"
            yield from _lines(one, indent + INDENT) if isinstance(one, Mapping) else _items(one, indent + INDENT)
        elif one is not None and one != "":
            yield f"{indent}{name}: {_said(one)}"


def _items(values: list[Any], indent: str) -> Iterator[str]:
    """Yield the lines of a list; an item of several lines begins with a dash."""
    for one in values:
        if isinstance(one, Mapping):
            first, *more = _lines(one, indent + INDENT)
            yield f"{indent}- {first.strip()}"
            yield from more
        else:
            yield f"{indent}{_said(one)}"


def _said(value: Any) -> str:
    """Return a value on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(str(value).split())
