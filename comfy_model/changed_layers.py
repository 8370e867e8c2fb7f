"""Changes that other nodes make to the layers of a network, without a patch that ComfyUI knows of.

``LayerWatch`` looks for all of them once per run. In each call it checks whether anything can have changed since.
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from .. import architectures
from .attention import preference_class
from .comfyui_internals import names_used_by
from .comfyui_shims import is_of_loading
from .whose_code import replaced_code

COMPUTES = frozenset({"forward", "_forward", "_conv_forward", "forward_comfy_cast_weights"})
"""Methods by which layers compute."""

_PADDING = "zeros"
"""Padding of all convolutions of these networks but LTX's, whose convolutions of videos reflect; for seamless tiles
other packs set ``circular``. In other layers a setting of this name may mean something else."""
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)

_PLAIN = frozenset({bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType})
"""Types of layers' settings, also inside lists, dicts and records: their values do not change by themselves."""
MACHINERY = frozenset(torch.nn.Module().__dict__)
"""Attributes that torch keeps on each layer: parts, hooks, the training flag."""
_OF_A_LOAD = frozenset({"weight_function", "bias_function"})
"""Attributes that loading sets on layers."""
_ORDERED = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
"""Layers that compute with their parts in the order in which they hold them. Other layers name their parts."""

_FAMILIES = architectures.__name__
_NO_FORWARD = torch.nn.Module.forward

_structures: weakref.WeakKeyDictionary[torch.nn.Module, Structure] = weakref.WeakKeyDictionary()


class _Seen:
    """A layer as it was seen: itself, its class, and the settings that its class's code reads."""

    __slots__ = ("kind", "layer", "names", "read", "values")

    def __init__(self, layer: torch.nn.Module):
        own, self.kind = layer.__dict__, type(layer)
        used = _read_by(self.kind)
        self.layer = weakref.ref(layer)
        self.names = [name for name, value in own.items() if name in used and is_setting(name, value)]
        self.read = itemgetter(*self.names) if self.names else _nothing
        values = self.read(own)
        if any(map(_is_mutable, map(own.get, self.names))):
            values = values if len(self.names) > 1 else (values,)
            copies = tuple(copy.deepcopy(value) if _is_mutable(value) else value for value in values)
            values = copies if len(copies) > 1 else copies[0]
        self.values = values

    def difference(self, own: dict) -> str | None:
        """Return the name of a setting that has changed, or None."""
        try:
            if self.read(own) == self.values:
                return None
        except KeyError:
            pass
        before = [self.values] if len(self.names) == 1 else self.values
        return next(n for n, was in zip(self.names, before, strict=True) if n not in own or own[n] != was)


def _nothing(_own: dict) -> None:
    return None


class Structure:
    """The layers of a network as they were when an engine was looked up, in order. Keeps none of them.

    Hashes, copies and live weights belong to these layers. Other layers make it another network.

    Attributes:
        answers: cached facts about the network, dropped with this object.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]):
        self.answers: dict[Hashable, Any] = {}
        self.seen = list(map(_Seen, layers))

    def difference(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> str | None:
        """Return in words the first difference of a network from this structure, or None."""
        for layer, seen in zip(layers, self.seen, strict=False):
            if seen.layer() is not layer or seen.kind is not type(layer):
                return f"{_name(module, layer)} is not the layer that was there"
            if (name := seen.difference(layer.__dict__)) is not None:
                return f"{name} of {_name(module, layer)} is not what it was when the engine was looked up"
        return None if len(layers) == len(self.seen) else "it has another number of layers than it had"

    def has_its_settings(self, attributes: Sequence[dict]) -> bool:
        """Tell whether all layers have their settings, given the ``__dict__`` of each."""
        try:
            return all(one.read(own) == one.values for one, own in zip(self.seen, attributes, strict=True))
        except KeyError:
            return False


def structure_of(module: torch.nn.Module) -> Structure | None:
    """Return the structure that engines of a network are looked up for; None before the first look."""
    return _structures.get(module)


def answers_about(module: torch.nn.Module) -> dict[Hashable, Any]:
    """Return the cached facts about a network; they hold while its structure stays the same."""
    found = _structures.get(module)
    return {} if found is None else found.answers


def layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return all layers of a network, itself first, in an order that differs where a layer has other parts.

    Written by hand for speed: large networks have thousands of layers.
    """
    layers, todo = [], [module]
    ignored = (type(None), preference_class())
    while todo:
        layer = todo.pop()
        layers.append(layer)
        parts = layer.__dict__["_modules"]
        if len(parts) > 1 and not isinstance(layer, _ORDERED):  # a part that was put back is the last one
            parts = {name: parts[name] for name in sorted(parts)}
        todo += [part for part in parts.values() if type(part) not in ignored]
    return layers


def foreign_layer(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> str | None:
    """Describe the first layer that computes something else than ComfyUI's or torch's code for it, or return None.

    Other packs set methods on layers (tiling's ``_conv_forward``), register hooks, or put in layers of their own.
    """
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return "all layers have a forward hook of another node"
    for layer in layers:
        if (what := replaced(layer)) is not None:
            return f"{_name(module, layer)} has a {what}"
    if any(map(_is_foreign, set(map(type, layers)))):
        layer = next(layer for layer in layers if _is_foreign(type(layer)))
        return f"{_name(module, layer)} is a {type(layer).__qualname__} of another pack"
    return None


def is_setting(name: str, value: object) -> bool:
    """Tell whether an attribute of a layer is a plain constant of its constructor, and not of loading."""
    if name in MACHINERY or name in _OF_A_LOAD or "comfy" in name:
        return False
    return _is_plain(value) and not is_of_loading(name, value)


def _is_plain(value: object) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    return all(_is_plain(getattr(value, field.name)) for field in dataclasses.fields(value))


def _is_mutable(value: object) -> bool:
    return type(value) not in _PLAIN and type(value) is not tuple


@functools.cache
def _read_by(kind: type) -> frozenset[str]:
    """Return the names of attributes that a class's code reads and its forward does not write."""
    return names_used_by(kind) - left_by_forward(kind)


def replaced(layer: torch.nn.Module) -> str | None:
    """Return in words the layer's own attribute that changes its class's computation, or None."""
    its = methods(type(layer))
    if not its.isdisjoint(layer.__dict__):
        for name in its.intersection(layer.__dict__):
            if not _is_its_own(layer, name):
                return f"{name} method that another node replaced"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "forward hook of another node"
    padding = layer.__dict__.get("padding_mode", _PADDING)
    own = padding == "reflect" and isinstance(layer, torch.nn.Conv3d)
    if padding != _PADDING and isinstance(layer, _CONVOLUTIONS) and not own:
        return f"padding of another node ({padding})"
    return None


@functools.cache
def left_by_forward(kind: type) -> frozenset[str]:
    """Return the names of attributes that a class's forward writes: results of its last call, not settings.

    Some networks keep results of a run, see ``architectures.kept_in_runs``.
    """
    functions = [inspect.unwrap(function) for name in COMPUTES if (function := getattr(kind, name, None)) is not None]
    codes = [getattr(function, "__code__", None) for function in functions]
    steps = (step for code in codes if code is not None for step in dis.get_instructions(code))
    return architectures.kept_in_runs() | {step.argval for step in steps if step.opname == "STORE_ATTR"}


@functools.cache
def methods(kind: type) -> frozenset[str]:
    """Return the names of all methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def layer_classes(kind: type) -> Iterator[type]:
    """Known classes in the MRO; base classes count only for layers that cast their weights.

    A layer of another pack or of a quantised model then counts as the plain layer: its weights come dequantised.
    """
    for base in kind.__mro__ if hasattr(kind, "comfy_cast_weights") else (kind,):
        if base is not kind and getattr(base, "forward", _NO_FORWARD) is _NO_FORWARD:
            continue  # a class without a forward is no layer
        if base.__module__.split(".")[0] in ("comfy", "torch", "einops") or base.__module__.startswith(f"{_FAMILIES}."):
            yield base


@functools.cache
def _is_foreign(kind: type) -> bool:
    return next(layer_classes(kind), None) is None


def _is_its_own(layer: torch.nn.Module, name: str) -> bool:
    """Tell whether a layer's own attribute is its class's method, as after ComfyUI restored it."""
    method = layer.__dict__[name]
    function = getattr(method, "__func__", None)
    return getattr(method, "__self__", None) is layer and function is getattr(type(layer), name)


def _name(module: torch.nn.Module, layer: torch.nn.Module) -> str:
    return next(name for name, found in module.named_modules() if found is layer) or type(module).__name__


_write_numbers = itertools.count(1)
"""Numbers of the writes to layers: torch sets and deletes all layers' attributes in two methods, which count here."""
_plain_set, _plain_delete = torch.nn.Module.__setattr__, torch.nn.Module.__delattr__
_latest_write = 0


def _counted_set(self: torch.nn.Module, name: str, value: Any) -> None:
    global _latest_write
    _plain_set(self, name, value)
    _latest_write = next(_write_numbers)  # after the write: a reader of the number sees the attribute


def _counted_delete(self: torch.nn.Module, name: str) -> None:
    global _latest_write
    _plain_delete(self, name)
    _latest_write = next(_write_numbers)


def _count_writes() -> None:
    """Have torch count from now on; once is enough. Writing to a layer's dicts directly is not counted."""
    if torch.nn.Module.__setattr__ is _plain_set and torch.nn.Module.__delattr__ is _plain_delete:
        torch.nn.Module.__setattr__, torch.nn.Module.__delattr__ = _counted_set, _counted_delete


def _writes() -> int:
    """Return the number of the latest write. Where another pack replaced the counting methods, each call is a write."""
    if torch.nn.Module.__setattr__ is _counted_set and torch.nn.Module.__delattr__ is _counted_delete:
        return _latest_write
    return next(_write_numbers)


class LayerWatch:
    """Watches one network, and keeps a reference to it."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._structure: Structure | None = None
        self._clean = False  # whether the last look found the layers of the structure
        _count_writes()

    def begin(self, adopt: bool) -> str | None:
        """Check the layers when an engine is looked up; return a change in words, or None. ``look`` compares with them.

        Args:
            adopt: accept other layers of ComfyUI's than before: they make it another network.
        """
        known = structure_of(self._module)
        if not (self._clean and self._structure is known and self._has_the_same()):
            number, layers = _writes(), layers_of(self._module)
            self._clean = False
            if (what := foreign_layer(self._module, layers)) is not None:
                return what
            if known is not None and (what := known.difference(self._module, layers)) is not None:
                if not adopt:
                    return what
                known = None
            if known is None:
                known = _structures[self._module] = Structure(layers)
            self._structure = known
            self._note(layers, number)
        return replaced_code(self._kinds)

    def look(self) -> str | None:
        """Return in words a change since ``begin``, or None. Takes a millisecond where layers were written to."""
        if self._structure is None:
            return self.begin(adopt=False)
        if not (self._clean and self._has_the_same()):
            number, layers = _writes(), layers_of(self._module)
            self._clean = False
            what = foreign_layer(self._module, layers) or self._structure.difference(self._module, layers)
            if what is not None:
                return what
            self._note(layers, number)
        return replaced_code(self._kinds)

    def look_again(self) -> str | None:
        """Return the same as ``look``, in microseconds where no layer was written to. For calls beside other packs."""
        return replaced_code(self._kinds) if self._clean and self._is_untouched() else self.look()

    def _note(self, layers: list[torch.nn.Module], number: int) -> None:
        """Note the values to compare later, of layers that match the structure.

        Args:
            number: the number of writes before the layers were read.
        """
        self._written, self._hooks_ever = number, -1
        self._layers, self._types, self._kinds = layers, list(map(type, layers)), frozenset(map(type, layers))
        self._own = own = [layer.__dict__ for layer in layers]
        self._hooks = [one[kind] for kind in ("_forward_hooks", "_forward_pre_hooks") for one in own]
        self._sizes, self._names = list(map(len, own)), list(map(list, own))
        self._methods = [(one, name, one[name]) for one, kind in zip(own, self._types, strict=True)
                         for name in methods(kind).intersection(one)]  # fmt: skip
        self._parts = [one["_modules"] for one in own if one["_modules"]]
        self._parts_before = list(map(dict, self._parts))
        self._orders = list(map(list, self._parts))
        # direct writes to these dicts are not counted, so they are compared: the network's, its lists', their blocks'
        lists = [part for part in self._module._modules.values() if part is not None]
        blocks = [block for part in lists for block in part._modules.values() if block is not None]
        self._top = [part.__dict__ for part in (self._module, *lists, *blocks)]
        self._top_sizes = list(map(len, self._top))
        self._lists = [part._modules for part in (self._module, *lists)]
        self._lists_before = list(map(dict, self._lists))
        values = (one[name] for seen, one in zip(self._structure.seen, own, strict=True) for name in seen.names)
        self._mutable = list(filter(_is_mutable, values))
        self._mutable_before = copy.deepcopy(self._mutable)
        self._clean = True

    def _is_untouched(self) -> bool:
        """Tell whether no layer was written to and none has a hook. Takes a microsecond or two."""
        return (_writes() == self._written and self._is_unhooked() and list(map(len, self._top)) == self._top_sizes
                and self._lists == self._lists_before and self._mutable == self._mutable_before)  # fmt: skip

    def _is_unhooked(self) -> bool:
        """Tell whether no layer has a hook. torch numbers hooks: only a new number makes it look at all layers."""
        ever = RemovableHandle.next_id
        if ever != self._hooks_ever:
            if any(self._hooks) or torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
                return False
            self._hooks_ever = ever
        return True

    def _has_the_same(self) -> bool:
        """Tell whether all layers have the noted classes, parts, settings, methods and names of attributes."""
        number = _writes()
        same = (
            self._is_unhooked()
            and list(map(type, self._layers)) == self._types
            and self._parts == self._parts_before
            and list(map(list, self._parts)) == self._orders
            and list(map(len, self._own)) == self._sizes
            and (number == self._written or list(map(list, self._own)) == self._names)
            and all(own.get(name) is method for own, name, method in self._methods)
            and self._structure.has_its_settings(self._own)
        )
        if same:
            self._written = number
        return same
