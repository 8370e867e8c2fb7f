"""The layout of a network: all of it but its weights. Engines that hold no weights, or take others, serve a layout."""

from __future__ import annotations

import hashlib
import weakref

import torch

from ..engine_library.manifest import LAYOUT_PREFIX

_FACTS = ("stride", "padding", "dilation", "groups", "num_groups", "eps", "heads")
"""What layers compute with that no shape of a weight tells."""

_layouts: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


def layout_of(module: torch.nn.Module) -> str:
    """What stands for any weights of a network in the identity of its engines: a hash of its names, shapes, settings.

    Cheap after the first time.
    """
    if module not in _layouts:
        lines = [f"{name} {tuple(parameter.shape)}" for name, parameter in sorted(module.named_parameters())]
        for name, layer in module.named_modules():
            facts = [(fact, getattr(layer, fact, None)) for fact in _FACTS]
            lines += [f"{name} {fact} {value}" for fact, value in facts if isinstance(value, int | float | str | tuple)]
        _layouts[module] = LAYOUT_PREFIX + hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return _layouts[module]
