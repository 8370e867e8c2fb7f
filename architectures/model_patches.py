"""Model patches that a family computes inside its engines: two networks, each with weights of its own, as one.

A model patch of ComfyUI calls a second network, the companion, inside a model's forward. A family that computes a patch
itself has an architecture for both networks together: it matches a ``WithCompanion`` and says in ``absorbs`` which
patches it takes.
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
    """A network and its companion as one module."""

    def __init__(self, base: torch.nn.Module, companion: torch.nn.Module):
        super().__init__()
        self.base = base
        self.companion = companion


def _same(parts: Mapping[str, Any]) -> Any | None:
    """Return the one object that lies in all places, or None."""
    first = next(iter(parts.values()))
    return first if all(part is first for part in parts.values()) else None


@dataclass(frozen=True, eq=False)
class AbsorbedPatch:
    """A kind of model patch that an architecture computes itself.

    Attributes:
        node: the name of the node that sets it.
        decides: the inputs of that node that decide which engine it is; others come anew with each call.
        module: the last part of the name of ComfyUI's module with the patch's classes. That of its nodes is imported
            by its path, so the rest of its name may be anything.
        places: the places of the network where it acts, by ComfyUI's names -> the name of the class that acts there.
        joined: what lies in these places -> the patch, which has the companion; None where they do not go together.
    """

    node: str
    decides: tuple[str, ...]
    module: str
    places: Mapping[str, str]
    joined: Callable[[Mapping[str, Any]], Any | None] = _same

    def find(self, patches: Mapping[str, Sequence[Any]]) -> Any | None:
        """Return the patch of this kind that acts in a call, or None where there is none, or another one beside it."""
        found = {place: given for place, given in patches.items() if given}
        if found.keys() != self.places.keys() or any(len(given) != 1 for given in found.values()):
            return None
        parts = {place: given[0] for place, given in found.items()}
        known = all(self._is_one(type(part), self.places[place]) for place, part in parts.items())
        return self.joined(parts) if known else None

    def again(self, patches: Mapping[str, Sequence[Any]], companion: ModelPatcher) -> dict[str, Any]:
        """Return the same patch by its places, with another network; it keeps what it computes to itself.

        Args:
            patches: those of a call, in which ``find`` finds the patch.
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
