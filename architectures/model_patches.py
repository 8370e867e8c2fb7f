"""Model patches that a family computes inside its engines: two networks, each with weights of its own, in an engine.

A model patch of ComfyUI calls a second network, the companion, inside a model's forward. A family that computes a patch
itself has an architecture for both networks together. It matches a ``WithCompanion``, and its ``absorbs`` is the kind
of patch that it takes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .shapes import TensorSpec

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

STRENGTH = TensorSpec("strength", "float32", (1,), sample="unit", steady=True)
"""The strength of a patch, an input of its engines."""


class WithCompanion(torch.nn.Module):
    """A module that holds a network and its companion."""

    def __init__(self, base: torch.nn.Module, companion: torch.nn.Module):
        super().__init__()
        self.base = base
        self.companion = companion


def _same(parts: Mapping[str, Any]) -> Any | None:
    """Return the object if the same object lies in all places, or None."""
    first = next(iter(parts.values()))
    return first if all(part is first for part in parts.values()) else None


@dataclass(frozen=True, eq=False)
class AbsorbedPatch:
    """A kind of model patch that an architecture computes itself.

    Attributes:
        node: the name of ComfyUI's node for it.
        decides: the inputs of the node that decide on the engine; each call gives its other inputs anew.
        module: the last part of the name of the module with the patch's classes. ComfyUI imports modules of nodes by
            path, so the rest of the name may be anything.
        places: ComfyUI's names of the places where it acts -> the name of the class that acts there.
        joined: the parts in these places -> the patch, which has the companion; None where they do not go together.
    """

    node: str
    decides: tuple[str, ...]
    module: str
    places: Mapping[str, str]
    joined: Callable[[Mapping[str, Any]], Any | None] = _same

    def find(self, patches: Mapping[str, Sequence[Any]]) -> Any | None:
        """Return the patch of this kind that acts in a call; None where there is none, or another patch beside it."""
        found = {place: given for place, given in patches.items() if given}
        if found.keys() != self.places.keys() or any(len(given) != 1 for given in found.values()):
            return None
        parts = {place: given[0] for place, given in found.items()}
        known = all(self._is_one(type(part), self.places[place]) for place, part in parts.items())
        return self.joined(parts) if known else None

    def again(self, patches: Mapping[str, Sequence[Any]], companion: ModelPatcher) -> dict[str, Any]:
        """Return the same patch by its places, with another network and results of its own.

        Args:
            patches: of a call in which ``find`` finds the patch.
        """
        patch = self.find(patches)
        own = copy.copy(patch)
        own.model_patch, made = companion, {id(patch): own}
        for (part,) in (patches[place] for place in self.places):
            if id(part) not in made:
                made[id(part)] = copy.copy(part)
                made[id(part)].patch = own
        return {place: made[id(patches[place][0])] for place in self.places}

    def _is_one(self, kind: type, name: str) -> bool:
        named = kind.__name__ == name and re.split(r"[./\\]", kind.__module__)[-1] == self.module
        code = getattr(kind.__call__, "__globals__", {})  # another pack's, where that has replaced it
        return named and code.get("__name__") == kind.__module__


def models_of(patch: Any) -> list[ModelPatcher]:
    """Return the patchers of a patch's networks, which ComfyUI loads with the model."""
    return patch.models() if hasattr(patch, "models") else []


def companion_of(patch: Any) -> ModelPatcher:
    """Return the patcher of the network of a model patch that engines compute."""
    return models_of(patch)[0]
