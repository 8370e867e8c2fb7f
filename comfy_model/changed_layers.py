"""Changes that other nodes make to a network besides its weights, without a patch that ComfyUI knows of.

``LayerWatch`` looks for all of them once per run, and for what is quick in every call.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Iterator, Sequence
from operator import eq, itemgetter

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from .. import architectures
from .attention import preference_class
from .comfyui_internals import names_used_by
from .comfyui_shims import is_of_loading
from .replaced_code import replaced_code

COMPUTES = frozenset({"forward", "_forward", "_conv_forward", "forward_comfy_cast_weights"})
"""Methods that other packs replace on layers."""

_PADDING = "zeros"
"""Padding of all convolutions of these networks; for seamless tiles other packs set ``circular``. Other layers may have
a setting of this name too, which is their own."""
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)

_SETTINGS = frozenset({bool, int, float, str, tuple, type(None)})
"""Of these types are the settings of layers, which do not change by themselves."""

_FAMILIES = architectures.__name__
_NO_FORWARD = torch.nn.Module.forward

_first_seen: weakref.WeakKeyDictionary[torch.nn.Module, list[_Seen]] = weakref.WeakKeyDictionary()
"""The layers that a network had, in order: hashes and live weights are of these."""


class _Seen:
    """A layer as it was seen first: itself, and the settings that its class's code reads."""

    __slots__ = ("layer", "names", "read", "values")

    def __init__(self, layer: torch.nn.Module):
        own, used = layer.__dict__, names_used_by(type(layer))
        self.layer = weakref.ref(layer)
        self.names = [name for name, value in own.items() if name in used and is_setting(name, value)]
        self.read = itemgetter(*self.names) if self.names else _nothing
        self.values = self.read(own)

    def difference(self, own: dict) -> str | None:
        """The name of a setting that is another one now, or None."""
        try:
            if self.read(own) == self.values:
                return None
        except KeyError:
            pass
        before = [self.values] if len(self.names) == 1 else self.values
        return next(n for n, was in zip(self.names, before, strict=True) if n not in own or own[n] != was)


def _nothing(_own: dict) -> None:
    return None


def layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All layers of a network, itself first. Made by hand: large networks have thousands."""
    layers, todo = [], [module]
    ignored = (type(None), preference_class())
    while todo:
        layer = todo.pop()
        layers.append(layer)
        todo += [part for part in layer.__dict__["_modules"].values() if type(part) not in ignored]
    return layers


def changed_in_place(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> str | None:
    """Find what another node changed in a network besides its weights; in words, or None.

    Other packs put methods on layers themselves (tiling's ``_conv_forward``), other layers in their place, or write to
    the settings that layers compute with. These are compared with those that were there when it was first seen.
    """
    for layer in layers:
        own = layer.__dict__
        suspect = not COMPUTES.isdisjoint(own) or own["_forward_hooks"] or own["_forward_pre_hooks"]
        if (suspect or own.get("padding_mode", _PADDING) != _PADDING) and (what := replaced(layer)) is not None:
            return f"{_name(module, layer)} has a {what}"
    if any(map(_is_foreign, set(map(type, layers)))):
        layer = next(layer for layer in layers if _is_foreign(type(layer)))
        return f"{_name(module, layer)} is a {type(layer).__qualname__} of another pack"
    before = _first_seen.get(module)
    if before is None:
        _first_seen[module] = list(map(_Seen, layers))
        return None
    for layer, seen in zip(layers, before, strict=False):
        if seen.layer() is not layer:
            return f"{_name(module, layer)} is not the layer that was there"
        if (name := seen.difference(layer.__dict__)) is not None:
            return f"{name} of {_name(module, layer)} is not what it was when the model was first seen"
    return None if len(layers) == len(before) else "it has fewer layers than it had"


def has_its_settings(module: torch.nn.Module, attributes: Sequence[dict]) -> bool:
    """Tell whether all layers have the settings that they were seen with first.

    Args:
        attributes: the ``__dict__`` of each of ``layers_of(module)``.
    """
    seen = _first_seen.get(module, ())
    try:
        return all(one.read(own) == one.values for one, own in zip(seen, attributes, strict=True))
    except (KeyError, ValueError):
        return False


def is_setting(name: str, value: object) -> bool:
    """Tell whether an attribute of a layer is a plain constant of its constructor, and not of loading."""
    return type(value) in _SETTINGS and name != "training" and "comfy" not in name and not is_of_loading(name, value)


def replaced(layer: torch.nn.Module) -> str | None:
    """Return what a layer itself has that makes it compute something else than its class says, in words, or None."""
    its = methods(type(layer))
    if not its.isdisjoint(layer.__dict__):
        for name in its.intersection(layer.__dict__):
            if not _is_its_own(layer, name):
                return f"{name} method that another node replaced"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "forward hook of another node"
    padding = layer.__dict__.get("padding_mode", _PADDING)
    if padding != _PADDING and isinstance(layer, _CONVOLUTIONS):
        return f"padding of another node ({padding})"
    return None


@functools.cache
def left_by_forward(kind: type) -> frozenset[str]:
    """The names of attributes that a class's forward writes: they tell of its last call, and are no settings."""
    functions = [inspect.unwrap(function) for name in COMPUTES if (function := getattr(kind, name, None)) is not None]
    codes = [getattr(function, "__code__", None) for function in functions]
    steps = (step for code in codes if code is not None for step in dis.get_instructions(code))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


@functools.cache
def methods(kind: type) -> frozenset[str]:
    """The names of all methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def layer_classes(kind: type) -> Iterator[type]:
    """The class and those below it that are of ComfyUI, torch, einops or one of our own families.

    Those below it only for a layer that casts its weights: another pack made it, or ComfyUI, for quantised ones, and
    it stands for the plain layer, since its weights come dequantised.
    """
    for base in kind.__mro__ if hasattr(kind, "comfy_cast_weights") else (kind,):
        if base is not kind and getattr(base, "forward", _NO_FORWARD) is _NO_FORWARD:
            continue  # it stands for no layer
        if base.__module__.split(".")[0] in ("comfy", "torch", "einops") or base.__module__.startswith(f"{_FAMILIES}."):
            yield base


@functools.cache
def _is_foreign(kind: type) -> bool:
    return next(layer_classes(kind), None) is None


def _is_its_own(layer: torch.nn.Module, name: str) -> bool:
    """Tell whether what lies on a layer is its class's method, as where ComfyUI has put it back."""
    method = layer.__dict__[name]
    function = getattr(method, "__func__", None)
    return getattr(method, "__self__", None) is layer and function is getattr(type(layer), name)


def _name(module: torch.nn.Module, layer: torch.nn.Module) -> str:
    return next(name for name, found in module.named_modules() if found is layer) or type(module).__name__


class LayerWatch:
    """Watches one network; keeps it, as whoever has the watch does."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._layers: list[torch.nn.Module] = []
        self._kinds: frozenset[type] = frozenset()
        self._hooks: list[dict] = []
        self._own: list[dict] = []
        self._attributes = 0
        self._put_back: list[tuple[dict, str, object]] = []  # methods that lie on layers and are their own
        self._hooks_ever = -1
        self._parts: list[dict] = []  # those of each layer, and the same when they were looked at
        self._parts_before: list[dict] = []

    def look(self) -> str | None:
        """Find what is not as ComfyUI made it; in words, or None. Once per run: it takes a millisecond or two.

        Where the last look found nothing and nothing seems to have changed since, it takes a part of that.
        """
        ever = RemovableHandle.next_id
        if not self._seems_unchanged():
            layers = self._layers = layers_of(self._module)
            self._parts_before = []
            if (what := changed_in_place(self._module, layers)) is not None:
                return what
            self._own = [layer.__dict__ for layer in layers]
            self._hooks = [own[kind] for kind in ("_forward_hooks", "_forward_pre_hooks") for own in self._own]
            self._kinds = frozenset(map(type, layers))
            self._parts = [own["_modules"] for own in self._own]
            self._parts_before = list(map(dict, self._parts))
            self._note_methods()
        self._hooks_ever = ever
        return replaced_code(self._kinds)

    def _seems_unchanged(self) -> bool:
        """True where layers have the same parts, settings, methods and number of attributes as at the last look."""
        if not self._parts_before or self._more_on_layers() or any(self._hooks):
            return False
        same_parts = all(map(eq, self._parts, self._parts_before))
        return same_parts and has_its_settings(self._module, self._own)

    def look_again(self, methods: bool) -> str | None:
        """Find a hook or method that was put on a layer since ``look``; in words, or None.

        Every hook that is registered anywhere has torch count one further; hooks are looked for when it has.

        Args:
            methods: look for replaced methods too. Takes 20 microseconds for a thousand layers, without it none.
        """
        if RemovableHandle.next_id != self._hooks_ever:
            if any(self._hooks) or torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
                return self._found() or "all layers have a forward hook of another node"
            self._hooks_ever = RemovableHandle.next_id
        if methods and self._more_on_layers():
            if (what := self._found()) is not None:
                return what
            self._note_methods()
        return None

    def _note_methods(self) -> None:
        self._attributes = sum(map(len, self._own))
        self._put_back = [(own, name, own[name]) for own in self._own for name in COMPUTES if name in own]

    def _more_on_layers(self) -> bool:
        """True where a layer has more attributes than before, or another method in the place of one."""
        if sum(map(len, self._own)) != self._attributes:
            return True
        return any(own.get(name) is not method for own, name, method in self._put_back)

    def _found(self) -> str | None:
        for layer in self._layers:
            if (what := replaced(layer)) is not None:
                name = next(name for name, found in self._module.named_modules() if found is layer)
                return f"{name or type(layer).__name__} has a {what}"
        return None
