"""Names of ComfyUI that the pack does not find, while ComfyUI itself goes on: as if they had other names now."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import pack
import pytest

THE_PACK = "hybrid_trt"
AGAIN = f"{THE_PACK}_renamed"
OPERATION = "architectures.user_attention"


@contextlib.contextmanager
def hidden(places: Iterable[str], instead: Any = None) -> Iterator[None]:
    """Inside, no code of the pack finds what lies at places of the table of internals, or it finds something else."""
    owners: dict[Any, set[str]] = {}
    for place in places:
        owner, name = owner_of(place)
        owners.setdefault(owner, set()).add(name)
    with contextlib.ExitStack() as stack:
        for owner, names in owners.items():
            hide = _hidden_in_module if isinstance(owner, types.ModuleType) else _hidden_in_class
            stack.enter_context(hide(owner, names, instead))
        yield


def owner_of(place: str) -> tuple[Any, str]:
    """The module or class that a place of the table lies in, and its name there."""
    module, _, path = place.partition("(")[0].replace("?", "").partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        if issubclass(getattr(owner, part), Enum):  # whose members nobody can replace
            return owner, part
        owner = getattr(owner, part)
    return owner, name


@contextlib.contextmanager
def pack_again() -> Iterator[str]:
    """The pack to be imported anew under another name, which is given; gone afterwards.

    One module is the pack's own: it registers an operation with torch, which takes the latest function of a name.
    """
    package = types.ModuleType(AGAIN)
    package.__path__ = [str(pack.ROOT)]
    sys.modules[AGAIN] = package
    sys.modules[f"{AGAIN}.{OPERATION}"] = importlib.import_module(f"{THE_PACK}.{OPERATION}")
    try:
        yield AGAIN
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == AGAIN]:
            del sys.modules[loaded]


@contextlib.contextmanager
def _hidden_in_module(module: types.ModuleType, names: set[str], instead: Any) -> Iterator[None]:
    class Renamed(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            return _answer(name, instead) if name in names and _asked() else getattr(module, name)

    stand_in, (package, _, last) = Renamed(module.__name__), module.__name__.rpartition(".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, stand_in)
        if package:
            patch.setattr(sys.modules[package], last, stand_in)
        yield


@contextlib.contextmanager
def _hidden_in_class(kind: type, names: set[str], instead: Any) -> Iterator[None]:
    own = kind.__getattribute__

    def of_objects(self: Any, name: str) -> Any:
        return _answer(name, instead) if name in names and _asked() else own(self, name)

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            if hasattr(kind, name):
                patch.setattr(kind, name, _Renamed(name, inspect.getattr_static(kind, name), instead))
        if not all(hasattr(kind, name) for name in names):
            patch.setattr(kind, "__getattribute__", of_objects)
        yield


class _Renamed:
    """In the place of something in a class."""

    def __init__(self, name: str, value: Any, instead: Any):
        self._name, self._value, self._instead = name, value, instead

    def __get__(self, owned: Any, owner: type) -> Any:
        if _asked():
            return _answer(self._name, self._instead)
        get = getattr(type(self._value), "__get__", None)
        return self._value if get is None else get(self._value, owned, owner)


def _asked() -> bool:
    """Return whether the pack's code asks."""
    return sys._getframe(2).f_globals.get("__name__", "").split(".")[0] in (THE_PACK, AGAIN)


def _answer(name: str, instead: Any) -> Any:
    if instead is None:
        raise AttributeError(f"the pack finds no {name}")
    return instead
