"""Model patches that a family computes inside its engines: two networks, each with weights of its own, as one.

A model patch of ComfyUI calls a second network, the companion, inside a model's forward. A family that computes a patch
itself has an architecture for both networks together: it matches a ``WithCompanion`` and says in ``absorbs`` which
patches it takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

_MODULE = "nodes_model_patch"
"""ComfyUI's module of model patches; its nodes are imported by their path, so the rest of its name may be anything."""


class WithCompanion(torch.nn.Module):
    """A network and its companion as one module."""

    def __init__(self, base: torch.nn.Module, companion: torch.nn.Module):
        super().__init__()
        self.base = base
        self.companion = companion


@dataclass(frozen=True)
class AbsorbedPatch:
    """A kind of model patch that an architecture computes itself.

    Attributes:
        kind: the name of ComfyUI's class.
        node: that of the node that sets it.
        decides: the inputs of that node that decide which engine it is; others come anew with each call.
        places: the places of the network where it acts, by ComfyUI's names.
    """

    kind: str
    node: str
    decides: tuple[str, ...]
    places: frozenset[str]

    def find(self, patches: Mapping[str, Sequence[Any]]) -> Any | None:
        """Return the patch of this kind that acts in a call, or None where there is none, or another one beside it."""
        found = [(place, patch) for place, given in patches.items() for patch in given]
        if len(found) != len(self.places) or {place for place, _ in found} != self.places:
            return None
        patch = found[0][1]
        alone = all(other is patch for _, other in found)
        return patch if alone and self._is_one(type(patch)) else None

    def _is_one(self, kind: type) -> bool:
        named = kind.__name__ == self.kind and re.split(r"[./\\]", kind.__module__)[-1] == _MODULE
        code = getattr(kind.__call__, "__globals__", {})  # another pack's, where that has replaced it
        return named and code.get("__name__") == kind.__module__


def models_of(patch: Any) -> list[ModelPatcher]:
    """Return the patchers of a patch's networks, which ComfyUI loads with the model."""
    return patch.models() if hasattr(patch, "models") else []


def companion_of(patch: Any) -> ModelPatcher:
    """Return the patcher of the network of a model patch that engines compute."""
    return models_of(patch)[0]
