"""Notices when another node has written to the weights of a loaded model, or put others in their place.

No patch tells of that, and torch counts no versions of tensors that nodes make. So some values of every weight are
compared once per run, which takes a millisecond or two.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

VALUES = 4
"""Compared of each weight, from rows at equal distances: each may be a page of a file that nobody else reads now."""

@dataclass
class _Noted:
    """A model's weights as they were looked at last.

    Attributes:
        places: each weight's name, with the dict of the layer that holds it and its name there.
        edition: how many others were found before.
    """

    places: list[tuple[str, dict, str]]
    values: bytes
    edition: int = 0


_noted: weakref.WeakKeyDictionary[torch.nn.Module, _Noted] = weakref.WeakKeyDictionary()


def edition_of(patcher: ModelPatcher) -> int:
    """The edition that ``look_for_edits`` found last. Cheap."""
    known = _noted.get(patcher.model)
    return 0 if known is None else known.edition


def look_for_edits(patcher: ModelPatcher) -> int:
    """The edition of a model's own weights, without patches: another number where they are others by now."""
    known = _noted.get(patcher.model)
    if known is None:
        places = [(f"{path}.{leaf}" if path else leaf, layer._parameters, leaf)
                  for path, layer in patcher.model.named_modules() for leaf in layer._parameters]  # fmt: skip
        known = _noted[patcher.model] = _Noted(places, _values_of(patcher, places))
    elif (values := _values_of(patcher, known.places)) != known.values:
        known.values, known.edition = values, known.edition + 1
    return known.edition


def _values_of(patcher: ModelPatcher, places: list[tuple[str, dict, str]]) -> bytes:
    """Some values of every weight, in the order of the names; of patched ones those that ComfyUI keeps aside."""
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    aside, by_hooks = getattr(patcher, "backup", {}), getattr(patcher, "hook_backup", {})
    with torch.inference_mode():
        for name, parameters, leaf in places:
            weight = parameters.get(leaf)
            if name in aside:
                weight = aside[name].weight
            if name in by_hooks:
                weight = by_hooks[name][0]
            if type(weight) not in _PLAIN:
                weight = getattr(weight, "_qdata", weight)
            if type(weight) in _PLAIN and not weight.is_meta and weight.numel():
                parts.setdefault((weight.device, weight.dtype), []).append(_some(weight))
        joined = [torch.cat(found).cpu().view(torch.uint8).numpy().tobytes() for found in parts.values()]
    return b"".join(sorted(joined))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _some(weight: torch.Tensor) -> torch.Tensor:
    """Values from the middle column of rows at equal distances, wherever and in whatever order they lie in memory."""
    shape, strides = weight.shape, weight.stride()
    if not shape:
        return weight.reshape(1)
    count = min(VALUES, shape[0])
    start = weight.storage_offset() + (shape[1] // 2 * strides[1] if len(shape) > 1 else 0)
    return weight.as_strided((count,), (shape[0] // count * strides[0],), start)
