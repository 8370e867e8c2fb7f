"""What changes a patcher's weights, remembered so that others, or the same one later, can be held against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class WeightPatches:
    """The patches on a patcher's weights at one moment. Refers to the patches, never to the patcher.

    ComfyUI's ``patches_uuid`` alone does not tell: it also changes, for good, when hooks of a prompt are registered on
    the patcher for one run.
    """

    def __init__(self, patcher: ModelPatcher):
        self._judged = (patcher.patches_uuid, True)
        self._patches = _patches_of(patcher)

    def same_on(self, patcher: ModelPatcher) -> bool:
        """Whether that patcher's weights are patched like these; hooks left aside. Cheap unless its uuid is new."""
        uuid = patcher.patches_uuid
        if uuid != self._judged[0]:
            self._judged = (uuid, _alike(self._patches, _patches_of(patcher)))
        return self._judged[1]


def _patches_of(patcher: ModelPatcher) -> dict[str, list]:
    """Name -> patches, all that gives a patcher a new uuid but hooks."""
    every = {f"weight {key}": list(patches) for key, patches in patcher.patches.items()}
    every |= {f"wrapper {key}": list(functions) for key, functions in patcher.weight_wrapper_patches.items()}
    every["compute dtype"] = [patcher.object_patches.get("manual_cast_dtype")]
    return every


def _alike(one: dict[str, list], other: dict[str, list]) -> bool:
    """Whether both hold the very same objects: clones of a patcher share them, and comparing tensors would be slow."""
    return one.keys() == other.keys() and all(_all_same(patches, other[key]) for key, patches in one.items())


def _all_same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(mine is theirs for mine, theirs in zip(one, other, strict=True))
