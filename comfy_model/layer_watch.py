"""Looks whether other nodes changed a network's layers or code: all of it once per run, what is quick in every call."""

from __future__ import annotations

from operator import eq

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from .changed_layers import COMPUTES, changed_in_place, has_its_settings, layers_of, replaced
from .replaced_code import replaced_code


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
