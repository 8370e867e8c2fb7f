"""Native UNet weights wait in main memory while an engine serves; the first native call of a run loads them.

ComfyUI has two ways of loading:

* *Dynamic VRAM* (the default on NVIDIA cards): loading only stages weights. Each layer fetches its own when it is
  called, and gives them up when memory is short. Layers that are not called hold nothing. But beside an engine ComfyUI
  would free memory for all of them and evict the text encoder and the VAE: here ComfyUI sees that they need none. It
  would also stage them again for each run, layer by layer: here staged weights stay.
* *Otherwise* ComfyUI would load all weights before each run. Here it loads them in its own low-memory way, with no
  bytes on the GPU. Native works in that state, only slowly, because each layer's weights are copied in each call. So
  other code may call native; our own calls first load the weights as usual. Where native runs repeatedly, weights are
  not moved each time: the run after such a call loads them at its start, and weights that ComfyUI loaded again stay
  until it needs the memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management, sampler_helpers
from comfy import utils as comfy_utils
from comfy.patcher_extension import CallbacksMP

from ..architectures.model_patches import models_of
from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.comfyui_shims import knows_pins
from ..comfy_model.weight_formats import patches_rounded
from . import NotCopied
from .controlnet import chain_of, is_lora

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.patcher_extension import WrapperExecutor

log = logging.getLogger(__name__)

ALMOST_NOTHING = 0.1
"""Bytes that a model may take; to ComfyUI 0 means all of it."""
EVERYTHING = 1e32

_staged: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
"""Model -> the weight patches (``patches_uuid``) that it was staged with, if it has no other patches."""


class OffloadedPatcher:
    """Stands for a patcher while ComfyUI loads models: makes the model ready to run with its weights off the device.

    All else is the patcher's own, so ComfyUI sees weights on the device and may free them.
    """

    def __init__(self, native: ModelPatcher):
        self.native = native
        self.parent = native  # ComfyUI uses the parent when the stand-in is gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def model_size(self) -> int:
        """Return the bytes that loading takes: none, and less if there are weights to give back."""
        return self.native.loaded_size() if self.native.is_dynamic() else 0

    def model_patches_models(self) -> list[ModelPatcher]:
        """Return the models that patches need on the device, without models that the engine replaces."""
        native = self.native
        needed = native.model_patches_models()
        if native.is_dynamic():
            return needed  # these hold nothing there until they are called
        patches = native.model_options["transformer_options"].get("patches", {})
        inside = [id(model) for given in patches.values() for patch in given for model in models_of(patch)]
        return [model for model in needed if id(model) not in inside]

    def partially_load(self, device_to: torch.device, *_: Any, **__: Any) -> int | None:
        """Patch the model as loading does, and take its weights off the device.

        Returns:
            The bytes that the device gained or lost, 0 or less. None under dynamic VRAM, which stages the weights.
        """
        native, model = self.native, self.native.model
        if native.is_dynamic():
            return stage(native, device_to)
        before = native.loaded_size()
        if before == 0 and model.model_lowvram and model.current_weight_patches_uuid == native.patches_uuid:
            # all weights are off the device already; a check of each layer would take longer than a step
            _patch_objects(native)
        else:
            native.partially_load(device_to, -EVERYTHING if before else ALMOST_NOTHING)
        for name, part in model.named_children():
            if name != "diffusion_model":
                part.to(device_to)  # the noise schedule: read at every step, which would wait for a copy
        return native.loaded_size() - before


def stage(native: ModelPatcher, device: torch.device) -> None:
    """Stage a model's weights as loading does under dynamic VRAM, unless they are still staged.

    ComfyUI visits every layer and copies small weights (norms, biases) to the device one by one, in each run.
    """
    if not works(Feature.STAGED_ONCE):
        native.partially_load(device)
        return
    if _is_staged(native, device):
        _patch_objects(native)
        _mark_in_use(native)
        return
    native.partially_load(device)
    if _patches_nothing_but_weights(native):
        _staged[native.model] = native.patches_uuid
    else:
        _staged.pop(native.model, None)


def _is_staged(native: ModelPatcher, device: torch.device) -> bool:
    """Tell whether a model is still staged for the same weight patches; checks each small weight."""
    model = native.model
    if _staged.get(model) != native.patches_uuid or not _patches_nothing_but_weights(native):
        return False
    if model.current_weight_patches_uuid != native.patches_uuid or model.device != device or not native.backup:
        return False
    pins = _pinned_memory(native)
    if pins is None or not knows_pins(pins):
        return False
    return all(comfy_utils.get_attr(model, key).device == device for key in native.backup)


def _patches_nothing_but_weights(native: ModelPatcher) -> bool:
    """Tell whether no other patch changes the model, its layers or its loading."""
    if native.object_patches or native.object_patches_backup or native.injections or native.forced_hooks is not None:
        return False
    return not native.get_all_callbacks(CallbacksMP.ON_LOAD)


def _patch_objects(native: ModelPatcher) -> None:
    """Do the other work of loading, without moving weights."""
    with native.use_ejected(skip_and_inject_on_exit_only=True):
        native.unpatch_model(native.offload_device, unpatch_weights=False)
        native.patch_model(load_weights=False)


def _mark_in_use(native: ModelPatcher) -> None:
    """Mark the model as running: ComfyUI then frees its pinned memory last."""
    _pinned_memory(native).update(failed=False, active=True)
    if (weights := native._vbar_get()) is not None:
        weights.prioritize()


def _pinned_memory(native: ModelPatcher) -> dict | None:
    """Return ComfyUI's record of a model's pinned memory; None if this ComfyUI has none."""
    return getattr(native.model, "dynamic_pins", {}).get(native.load_device)


class NativeWeights(NotCopied):
    """Controls where one sampler patch's native weights are, run by run.

    It refers to patchers only during a run: they refer to it, and ComfyUI counts references to free models.
    """

    def __init__(self, plan: Callable[[ModelPatcher, Mapping, Any], bool]):
        """
        Args:
            plan: takes a run's patcher, transformer options and shape of noise; True if an engine is expected to
                serve its calls without the native weights.
        """
        self._plan = plan
        self._stand_in: OffloadedPatcher | None = None  # ComfyUI refers to it weakly
        self._memory = (0.0, 0.0)
        self._wanted = False
        self._served = True
        self._gave_back = False

    def prepare(
        self,
        executor: WrapperExecutor,
        model: ModelPatcher,
        noise_shape: Any,
        conds: dict[str, list],
        model_options: dict | None = None,
        force_full_load: bool = False,
        force_offload: bool = False,
    ) -> Any:
        """Have ComfyUI load models for a run, native's weights only if needed; a PREPARE_SAMPLING wrapper."""
        rest = {"model_options": model_options, "force_full_load": force_full_load, "force_offload": force_offload}
        wanted, self._wanted, self._stand_in = self._wanted, False, None
        options = model_options or {}
        self._served = self._plan(model, options.get("transformer_options", {}), noise_shape)
        if wanted or force_full_load or force_offload or not self._served or not _may_wait(model, conds, options):
            return executor(model, noise_shape, conds, **rest)
        if not model.is_dynamic():
            loaded = model.loaded_size() > 0
            if loaded and self._gave_back:  # ComfyUI loaded them again: they stay until it needs the memory
                return executor(model, noise_shape, conds, **rest)
            self._gave_back = loaded
        self._memory = _memory_for(model, noise_shape, conds)
        if model.is_dynamic():
            _give_up_pages(model, self._memory[1])
        self._stand_in = OffloadedPatcher(model)
        if not model.is_dynamic() and model.loaded_size() > 0:
            self._stand_in.partially_load(model.load_device)  # now: ComfyUI loads engines before the model itself
        return executor(self._stand_in, noise_shape, conds, **rest)

    def bring(self) -> None:
        """Load native's weights for a call and the rest of this run; the next run loads them at its start.

        Calls of a run that was native's from the start say nothing of the next one.
        """
        self._wanted = self._served
        if self._stand_in is None:
            return
        native, self._stand_in = self._stand_in.native, None
        if native.is_dynamic():
            return  # each layer fetches its own
        log.info("Hybrid TRT: loading the normal model for steps that the engine does not take")
        in_use = model_management.loaded_models(only_currently_used=True)
        beside = [model for model in in_use if not native.is_clone(model)]
        memory, least = self._memory
        model_management.load_models_gpu([native, *beside], memory_required=memory, minimum_memory_required=least)

    def end_run(self, _patcher: ModelPatcher) -> None:
        """Drop the stand-in, because ComfyUI uses the patcher itself again; an ON_CLEANUP callback."""
        self._stand_in = None


def _may_wait(model: ModelPatcher, conds: dict[str, list], model_options: Mapping) -> bool:
    """Tell whether this run calls native only if the engine refuses a call."""
    if not has_memory_of_its_own(model.load_device):
        return False
    if model.model.current_patcher is not None:  # another guider is sampling with these weights
        return False
    if not model.is_dynamic() and patches_rounded(model):  # off the device they would not be rounded
        return False
    if model.get_additional_models_with_key("multigpu") or "registered_hooks" in model_options:
        return False
    every = [cond for group in conds.values() for cond in group or ()]
    if any("hooks" in cond for cond in every):
        return False
    controls = (control for cond in every for control in chain_of(cond.get("control")))
    return not any(is_lora(control) for control in controls)  # it computes with the UNet's own weights


def has_memory_of_its_own(device: torch.device) -> bool:
    """Tell whether a device has memory apart from main memory."""
    return not model_management.is_device_cpu(device)


def _give_up_pages(model: ModelPatcher, least: float) -> None:
    """Free the pages that native calls have left on the device, if memory is short: ComfyUI's plan counts them as used.

    Args:
        least: bytes that ComfyUI keeps free for activations.
    """
    pages = model.loaded_size() - model.model.model_loaded_weight_memory
    if pages > 0 and model_management.get_free_memory(model.load_device) < least + model.model_size():
        model.partially_unload(model.offload_device, pages)


def _memory_for(model: ModelPatcher, noise_shape: Any, conds: dict[str, list]) -> tuple[float, float]:
    """Return the bytes that ComfyUI keeps free for a run's activations, and the minimum."""
    memory, least = sampler_helpers.estimate_memory(model, noise_shape, conds)
    controls = sampler_helpers.get_additional_models(conds, model.model_dtype())[1]
    return memory + controls, least + controls
