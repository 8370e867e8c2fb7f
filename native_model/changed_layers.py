"""What other nodes changed in a network besides its weights, without a patch that ComfyUI's patchers would know of."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator

import torch

from .. import architectures
from .attention import preference_class

_COMPUTES = frozenset({"forward", "_forward", "_conv_forward", "forward_comfy_cast_weights"})
"""Methods that other packs replace on layers."""

_PADDING = "zeros"
"""What all convolutions of these networks are padded with; for seamless tiles other packs say ``circular`` there."""

_FAMILIES = architectures.__name__
_NO_FORWARD = torch.nn.Module.forward

_first_seen: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()
"""The layers that a network had, in order: hashes and live weights are of these."""


def changed_in_place(module: torch.nn.Module) -> str | None:
    """What another node has changed in a module besides its weights, in words, or None.

    Other packs put methods on layers themselves (tiling's ``_conv_forward``), or other layers in their place.
    """
    layers, todo = [], [module]  # by hand, and few methods: large networks have thousands of layers
    ignored = (type(None), preference_class())
    while todo:
        own = (layer := todo.pop()).__dict__
        layers.append(layer)
        suspect = any(map(own.__contains__, _COMPUTES)) or own["_forward_hooks"] or own["_forward_pre_hooks"]
        if (suspect or own.get("padding_mode", _PADDING) != _PADDING) and (what := replaced(layer)) is not None:
            return f"{_name(module, layer)} has a {what}"
        todo += [part for part in own["_modules"].values() if type(part) not in ignored]
    if any(map(_is_foreign, set(map(type, layers)))):
        layer = next(layer for layer in layers if _is_foreign(type(layer)))
        return f"{_name(module, layer)} is a {type(layer).__qualname__} of another pack"
    before = _first_seen.get(module)
    if before is None:
        _first_seen[module] = list(map(weakref.ref, layers))
        return None
    for layer, ref in zip(layers, before, strict=False):
        if ref() is not layer:
            return f"{_name(module, layer)} is not the layer that was there"
    return None if len(layers) == len(before) else "it has fewer layers than it had"


def replaced(layer: torch.nn.Module) -> str | None:
    """What a layer itself has that makes it compute something else than its class says, in words, or None."""
    its = methods(type(layer))
    if not its.isdisjoint(layer.__dict__):
        for name in its.intersection(layer.__dict__):
            if not _is_its_own(layer, name):
                return f"{name} method that another node replaced"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "forward hook of another node"
    if (padding := layer.__dict__.get("padding_mode", _PADDING)) != _PADDING:
        return f"padding of another node ({padding})"
    return None


@functools.cache
def methods(kind: type) -> frozenset[str]:
    """The names of all methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def layer_classes(kind: type) -> Iterator[type]:
    """The class and those below it that are of ComfyUI, torch or one of our own families.

    Those below it only for a layer that casts its weights: another pack made it, or ComfyUI, for quantised ones, and
    it stands for the plain layer, since its weights come dequantised.
    """
    for base in kind.__mro__ if hasattr(kind, "comfy_cast_weights") else (kind,):
        if base is not kind and getattr(base, "forward", _NO_FORWARD) is _NO_FORWARD:
            continue  # it stands for no layer
        if base.__module__.split(".")[0] in ("comfy", "torch") or base.__module__.startswith(f"{_FAMILIES}."):
            yield base


@functools.cache
def _is_foreign(kind: type) -> bool:
    return next(layer_classes(kind), None) is None


def _is_its_own(layer: torch.nn.Module, name: str) -> bool:
    """Whether what lies on a layer is its class's method, as where ComfyUI has put it back."""
    method = layer.__dict__[name]
    function = getattr(method, "__func__", None)
    return getattr(method, "__self__", None) is layer and function is getattr(type(layer), name)


def _name(module: torch.nn.Module, layer: torch.nn.Module) -> str:
    return next(name for name, found in module.named_modules() if found is layer) or type(module).__name__
