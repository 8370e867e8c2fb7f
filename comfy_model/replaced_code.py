"""Finds code of other packs in the place of ComfyUI's or torch's, where a network computes with it.

Engines hold what ComfyUI's own code computes. Packs replace functions of its modules and methods of its classes for all
models at once, some of them for good. Here each such place that a network's forward reaches is noted once, by reading
the names in its code, and compared when a run begins.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..architectures.calls import APPLY_CONTROL, only_adds_residuals
from .comfyui_internals import names_in
from .whose_code import code_of, is_known, pack_of, wrapped

_FOLLOWED = ("comfy.ldm", "comfy.cldm", "comfy.taesd", "torch.nn.modules")
"""Packages whose functions are read for the names that they use. Casting and loading, which engines do not do, are in
others."""
_LOOKED_INTO = (*_FOLLOWED, "torch", "einops", "math", "comfy_kitchen")
"""Packages in which a name after a dot is looked up."""
ATTENTION = "scaled_dot_product_attention"
"""The function of torch that ComfyUI's attention and that of engines come down to."""

_CALLED = ("forward", "decode", "encode", "forward_control_block", "forward_noise_refiner_block", "apply",
           "encode_conditioning")
"""Methods that ComfyUI calls from outside: two of VAEs, and those of model patches' networks."""

_MAY_DIFFER: Mapping[tuple[str, str], Callable[[Callable], bool]] = {APPLY_CONTROL: only_adds_residuals}
"""Places where packs leave harmless functions for good, each with a test of that: they differ only in calls that no
engine takes."""

_noted: dict[frozenset[type], _Places] = {}
"""The places of networks by the classes of their layers, where all of them are ComfyUI's own."""


@dataclass
class _Places:
    """The places of a network's code, and the objects that were there.

    Attributes:
        owners, names, found, codes: for each place the namespace, the name in it, the object and its code.
        sizes: classes, with how many names they have: a method may be put before an inherited one.
        checked: another pack's functions that may differ, each with what tells that it does not, and in words.
        foreign: another pack's objects, in words.
    """

    owners: list[Mapping[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)
    codes: list[types.CodeType | None] = field(default_factory=list)
    sizes: list[tuple[type, int]] = field(default_factory=list)
    checked: list[tuple[Callable, Callable[[Callable], bool], str]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def unchanged(self) -> bool:
        """True while the same objects lie in all places."""
        if any(len(vars(kind)) != size for kind, size in self.sizes):
            return False
        places = zip(self.owners, self.names, self.found, self.codes, strict=True)
        return all(owner.get(name) is one and code_of(one) is code for owner, name, one, code in places)

    def first_difference(self) -> str | None:
        """The first place whose code computes something else than ComfyUI's, in words, or None."""
        if self.foreign:
            return self.foreign[0]
        return next((words for function, same, words in self.checked if not same(function)), None)

    def add(self, owner: Mapping[str, Any], name: str, module: str, qualified: str) -> list[Callable]:
        """Note a place by its module and the name there; its functions where their code is to be read."""
        value = owner[name]
        self.owners.append(owner)
        self.names.append(name)
        self.found.append(value)
        self.codes.append(code_of(value))
        functions = list(wrapped(_inner(value)))
        stranger = next((one for one in functions if not is_known(one)), None)
        if stranger is None:
            read = str(getattr(functions[0], "__module__", "")).startswith(_FOLLOWED)
            return [one for one in functions if read and code_of(one) is not None]
        words = f"the pack {pack_of(stranger)} has replaced {qualified} for all models"
        if (same := _MAY_DIFFER.get((module, qualified))) is not None:
            self.checked.append((functions[0], same, words))
        else:
            self.foreign.append(words)
        return []


def replaced_code(kinds: frozenset[type]) -> str | None:
    """Find code of another pack that layers of some classes compute with; in words, or None.

    Reads that code the first time, in milliseconds; after that it compares.
    """
    places = _noted.get(kinds)
    if places is None or not places.unchanged():
        places = _places_of(kinds)
        if places.foreign:
            _noted.pop(kinds, None)
        else:
            _noted[kinds] = places
    return places.first_difference()


def _places_of(kinds: Collection[type]) -> _Places:
    """All places that the forward of some classes reaches, directly or through ComfyUI's functions."""
    places, known, todo = _Places(), set(), []
    bases = {base for kind in kinds for base in kind.__mro__} - {object, torch.nn.Module}
    methods: dict[str, list[type]] = {}  # a call of a method tells its name alone
    for base in bases:
        places.sizes.append((base, len(vars(base))))
        for name, value in list(vars(base).items()):
            if callable(_inner(value)):
                methods.setdefault(name, []).append(base)

    def reach(owner: Mapping[str, Any], name: str, module: str, qualified: str) -> None:
        if (module, qualified) not in known and name in owner:
            known.add((module, qualified))
            todo.extend(places.add(owner, name, module, qualified))

    def reach_methods(name: str) -> None:
        for base in methods.pop(name, ()):
            reach(vars(base), name, base.__module__, f"{base.__qualname__}.{name}")

    for name in ("__call__", "_call_impl", "_wrapped_call_impl"):
        reach(vars(torch.nn.Module), name, torch.nn.Module.__module__, f"Module.{name}")
    reach(vars(torch.nn.functional), ATTENTION, torch.nn.functional.__name__, ATTENTION)
    for name in _CALLED:
        reach_methods(name)
    while todo:
        function = todo.pop()
        names = frozenset(names_in(function.__code__))
        for name in names:
            reach_methods(name)
        for owner, name, module in _used_by(function, names):
            reach(owner, name, module, name)
    return places


def _used_by(function: Callable, names: Collection[str]) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Callables in modules that a function's code names: the namespace, the name and the module's name."""
    space = function.__globals__
    todo, seen = [], set()
    for name in names:
        value = space.get(name)
        if isinstance(value, types.ModuleType):
            todo.append(value)
        elif callable(value):
            yield space, name, str(space.get("__name__", ""))
    while todo:
        module = todo.pop()
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        looked_into = module.__name__.startswith(_LOOKED_INTO)
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, types.ModuleType):
                if value.__name__.split(".")[0] in ("comfy", "torch", "comfy_kitchen"):
                    todo.append(value)
            elif looked_into and callable(value):
                yield vars(module), name, module.__name__


def _inner(value: Any) -> Any:
    """The function in a class's entry, be it a static method, a class method or a property."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value
