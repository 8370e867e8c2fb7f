"""Model patches on several GPUs: each GPU has a patch of its own, with a network of its own.

ComfyUI calls the same patch for all GPUs at once, each in a thread. But its network is on one GPU, and its
attributes hold values from layer to layer, so that a GPU's layers would take another GPU's values.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher as Patcher

from ..architectures import absorbed_patch
from ..architectures.model_patches import companion_of, models_of
from .module_copy import native_copy
from .weight_hash import look_for_edits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from comfy.model_patcher import ModelPatcher

THREAD = "multigpu_thread_device"
"""Key of a call's GPU in its options, where ComfyUI makes several calls at once."""

_elsewhere: weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.device, tuple[int, ModelPatcher]]] = (
    weakref.WeakKeyDictionary()
)
"""A patch's network -> device -> the edition of its weights that was copied there, and the copy."""


class PatchesOnGpus:
    """The model patch, on each GPU, of a model that several GPUs sample with, if engines compute its kind."""

    def __init__(self) -> None:
        self._parts: Mapping[str, Any] = {}
        self._own: dict[torch.device, dict[str, Any]] = {}

    def plan(self, patcher: ModelPatcher, copy: ModelPatcher) -> bool:
        """Give a model, and its copy on another GPU, a patch each. The copy has its own from now on.

        Returns:
            True if the patch of that GPU has another network than before, since its weights were edited.
        """
        options = copy.model_options["transformer_options"]
        patches = options.get("patches", {})
        found = absorbed_patch(copy.model.diffusion_model, patches)
        parts = {} if found is None else {place: patches[place][0] for place in found[0].places}
        if {p: id(part) for p, part in parts.items()} != {p: id(part) for p, part in self._parts.items()}:
            self._parts, self._own = parts, {}
        if found is None:
            return False
        kind, patch = found
        if patcher.load_device not in self._own:
            self._own[patcher.load_device] = kind.again(patches, companion_of(patch))
        device, known = copy.load_device, self._own.get(copy.load_device)
        network = _on(companion_of(patch), device)
        edited = known is not None and network not in [one for part in known.values() for one in models_of(part)]
        if known is None or edited:
            known = self._own[device] = kind.again(patches, network)
        options["patches"] = {**patches, **{place: [part] for place, part in known.items()}}
        return edited

    def put(self, options: Mapping[str, Any]) -> None:
        """Replace the shared patch by the GPU's own in the options of a call there."""
        device, patches = options.get(THREAD), options.get("patches", {})
        for place, part in self._own.get(device, {}).items():
            if hasattr(part, "to"):  # as ComfyUI does with the shared patch
                part.to(device)
            patches[place] = [part if one is self._parts[place] else one for one in patches.get(place, ())]


def _on(companion: ModelPatcher, device: torch.device) -> ModelPatcher:
    """Return the patcher of a patch's network, or of the network's copy on another device."""
    if companion.load_device == device or companion.patches:  # patched weights may be in the network itself
        return companion
    copies = _elsewhere.setdefault(companion.model, {})
    edition = look_for_edits(companion)
    if device not in copies or copies[device][0] != edition:
        model_management.unload_model_and_clones(companion)  # else the copy would lie on its device too
        with torch.inference_mode(False):  # the threads of GPUs are outside of it
            network = native_copy(companion.model)
        copies[device] = edition, Patcher(network, device, companion.offload_device)
    return copies[device][1]
