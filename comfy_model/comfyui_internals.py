"""Features that are switched off where ComfyUI's own code is not as expected.

The table of names is read once, when the pack loads. A missing name costs a feature and never the picture, and the log
says so once. Functions of other packs in the place of ComfyUI's are found elsewhere, see ``whose_code``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from .. import architectures
from .comfyui_names import COMPUTED_HERE_TOO, TABLE, Feature

log = logging.getLogger(__name__)

_off: dict[Feature, list[str]] | None = None
_without: list[str] = []
"""Sentences on the families that are left out."""


def check() -> dict[Feature, list[str]]:
    """Compare the table with this ComfyUI; log and return the features that are switched off: feature -> reasons."""
    global _off
    _off = {}
    names_used_by.cache_clear()
    for feature, places in TABLE.items():
        lacking = [what for place in places if (what := _lacks(place)) is not None]
        if feature is Feature.STACKS:
            lacking += [what for place in COMPUTED_HERE_TOO if (what := _computes_more(place)) is not None]
        if lacking:
            switch_off(feature, "; ".join(lacking))
    _check_families()
    return _off


def _check_families() -> None:
    """Leave out families whose code in this ComfyUI is not as expected, and say so in the log."""
    for family, places in architectures.needs().items():
        lacking = [f"{family} cannot be imported"] if places is None else [w for p in places if (w := _lacks(p))]
        if lacking:
            architectures.leave_out(family)
            if (why := f"{'; '.join(lacking)}, so models of the family {family} run at normal speed") not in _without:
                _without.append(why)
                log.warning("Hybrid TRT: %s. Images are right, at most slower. Please report this.", why)


def works(feature: Feature) -> bool:
    """Tell whether a feature may be used with this ComfyUI."""
    return feature not in (check() if _off is None else _off)


def switch_off(feature: Feature, why: str) -> None:
    """Do without a feature from now on, and say so once."""
    off = check() if _off is None else _off
    if why not in off.setdefault(feature, []):
        off[feature].append(why)
        log.warning("Hybrid TRT: %s. Please report this with the version of your ComfyUI.", _sentence(feature, why))


def switched_off(features: Iterable[Feature] | None = None) -> list[str]:
    """Return a sentence for each feature that is off, and why; without ``features`` also for families."""
    off, left_out = check() if _off is None else _off, _without if features is None else []
    sentences = [f"{_sentence(one, '; '.join(off[one]))}." for one in features or Feature if one in off]
    return [*sentences, *(f"{why}. Images are right, at most slower." for why in left_out)]


def _sentence(feature: Feature, why: str) -> str:
    what, instead = feature.value
    return f"{why}, so {what} are switched off and {instead}. Images are right, at most slower"


def _lacks(place: str) -> str | None:
    """Describe what is missing or different at a place of the table, or return None."""
    name, _, given = place.partition("(")
    found, words = _find(name.replace("?", "")), _words(name)
    if found is _NOWHERE:
        return None if "?" in name else f"this ComfyUI has no {words}"
    if not given:
        return None
    if _takes(found, given.removesuffix(")").split(", ")):
        return None
    return f"this ComfyUI's {words} takes other arguments"


_NOWHERE = object()


def _find(name: str) -> Any:
    """Return the object at a place, or ``_NOWHERE``; any object for an attribute of a class's instances."""
    module, _, path = name.partition(":")
    if module not in sys.modules and module in _SERVERS:
        return None  # a process without a server
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return _NOWHERE
    for part in path.split("."):
        owner, found = found, getattr(found, part, _NOWHERE)
        if found is _NOWHERE:
            return None if isinstance(owner, type) and part in names_used_by(owner) else _NOWHERE
    return found


_SERVERS = ("execution",)
"""Modules that only a server needs. A server has imported them before this pack."""


def _words(name: str) -> str:
    return name.replace("?", "").replace(":", ".")


def _takes(function: Any, given: list[str]) -> bool:
    """Tell whether a function takes these arguments, so that our calls and our replacements of it work."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return True
    parameters = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True  # another pack's wrapper, which hands on all its arguments
    known, more = [name for name in given if name not in ("...", "**", "")], "..." in given
    if len(parameters) < len(known) or (len(parameters) > len(known) and not more):
        return False
    named = all(name in ("_", "self", p.name) for name, p in zip(known, parameters, strict=False))
    return named and all(p.default is not p.empty for p in parameters[len(known) :])


def _computes_more(place: str) -> str | None:
    """Return in words the unknown names that a function of ComfyUI's uses, or None."""
    function = inspect.unwrap(_find(place)) if callable(_find(place)) else None
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != inspect.getfile(sys.modules[place.partition(":")[0]]):
        return None  # another pack's function, see ``whose_code``
    unknown = sorted(set(names_in(code)) - COMPUTED_HERE_TOO[place])
    return f"this ComfyUI's {_words(place)} uses {', '.join(unknown)}" if unknown else None


@functools.cache
def names_used_by(kind: type) -> frozenset[str]:
    """Return all names in the code of a class's methods, with the attributes that they set."""
    functions = [getattr(f, "fget", f) for base in kind.__mro__ for f in vars(base).values()]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f)]
    return frozenset(name for code in codes if code is not None for name in names_in(code))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Iterate over the names that code looks up, also in nested functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)
