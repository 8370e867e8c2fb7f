"""An engine-backed CONTROL_NET: ComfyUI's own ControlNet object with an engine where its network was.

The object stays exactly ``comfy.controlnet.ControlNet``, so copying, chaining, strengths, ranges, masks and other packs
that convert ControlNets treat it as any other. Kinds that no engine serves run unchanged, and their calls are counted.
"""

from __future__ import annotations

import copy
from contextvars import Context
from typing import TYPE_CHECKING, Any

import comfy.controlnet
import torch
from comfy import model_management
from comfy.controlnet import ControlNet

from ..architectures import Role
from ..architectures.calls import Control
from ..comfy_model.network import NativeNetwork
from ..comfy_model.weight_patches import last_loaded, lies_on_its_model
from . import InPlaceOfNative
from .call_stats import open_stats, timed
from .engine_handle import EngineHandle
from .engine_patcher import ControlPatcher
from .hint_cache import KeptHints
from .nan_guard import checked_for_nan
from .native_network import by_name, run_native
from .run_context import in_run

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase
    from comfy.model_patcher import ModelPatcher

    from ..engine_library import Fallback


def is_lora(control: ControlNet) -> bool:
    """Tell whether it is a Control-LoRA; a ComfyUI without their class has none."""
    return isinstance(control, getattr(comfy.controlnet, "ControlLora", ()))


def native_controlnet(controlnet: ControlNet) -> ControlNet:
    """Return the native CONTROL_NET behind an engine-backed CONTROL_NET, or the given object."""
    if isinstance(getattr(controlnet, "control_model", None), EngineControlModel):
        native = controlnet.copy()
        native.control_model = controlnet.control_model.native
        whose, own = controlnet.control_model_wrapped, controlnet.control_model.native_patcher
        native.control_model_wrapped = getattr(whose, "native", own)  # with what another pack has added
        return native
    return controlnet


def back_with_engine(controlnet: ControlNet, handle: EngineHandle) -> ControlNet:
    """Return a copy of a native CONTROL_NET that runs on the handle's engine whenever that can serve a call."""
    backed = controlnet.copy()
    backed.control_model = EngineControlModel(handle, controlnet)
    # get_models() has ComfyUI load this: the engine, or native in its place, as decided when ComfyUI plans
    backed.control_model_wrapped = backed.control_model.patcher
    return backed


def chain_of(control: ControlBase | None) -> list[ControlBase]:
    """Return a CONTROL_NET and all that act before it, the first to act first."""
    chain = []
    while control is not None:
        chain.append(control)
        control = control.previous_controlnet
    return chain[::-1]


class EngineControlModel(InPlaceOfNative):
    """Takes the place of ``ControlNet.control_model``: same call, same result, computed by an engine or by native.

    Attributes:
        patcher: patcher by which ComfyUI loads the engine, and other packs patch the weights.
        on_gpus: the models for it on other GPUs.
        run: context of the current run, where several GPUs share it; their threads have none.
    """

    def __init__(self, handle: EngineHandle, controlnet: ControlNet):
        self.native = controlnet.control_model
        self.native_patcher: ModelPatcher = controlnet.control_model_wrapped
        self.handle = handle
        self.patcher = ControlPatcher(handle.patcher, self.native_patcher)
        self.hints = KeptHints()
        self.on_gpus: dict[torch.device, EngineControlModel] = {}
        self.run: Context | None = None
        self._arguments = handle.network.arguments()

    @property
    def network(self) -> NativeNetwork:
        return self.handle.network

    def why_not_patched_so(self) -> Fallback | None:
        """Return the reason why the engine is not valid for the patches that act on calls, or None. Cheap."""
        return self.handle.why_not_patched_so(self.patcher.in_force())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that ComfyUI casts inputs to: native's, so that a fallback gets the dtype it expects."""
        return self.native.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Control:
        """Compute the residuals of one call, with native's arguments.

        Returns:
            Residuals as native gives them. ComfyUI may write to them: it multiplies them by the strength in place. On
            the session's own stream they are lent until the next call.
        """
        context = in_run(self.run)
        return self._compute(*args, **kwargs) if context is None else context.run(self._compute, *args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Control:
        call = by_name(self._arguments, args, kwargs)
        patcher = self.patcher.in_force()
        stats = self.handle.begin_run(patcher)
        refusal = self.handle.why_not_patched_so(patcher)
        served, residuals = self.handle.serve(refusal, lambda: checked_for_nan(self.handle.bind(call)), patcher, stats)
        if served:
            return residuals
        self._make_native_resident(patcher)
        return run_native(lambda: self.native(*args, **kwargs), self.handle.stats, self.handle.network.device)

    def _make_native_resident(self, patcher: ModelPatcher) -> None:
        """Load native's weights beside all models in use: ComfyUI loaded the engine in their place.

        Checked in every call: ComfyUI may unload them between two runs of one node, or within a run.
        """
        if last_loaded(patcher.model) is not patcher or not lies_on_its_model(patcher):
            in_use = model_management.loaded_models(only_currently_used=True)
            beside = [model for model in in_use if not patcher.is_clone(model)]
            model_management.load_models_gpu([*beside, patcher])

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module | EngineControlModel:
        if memo:  # part of a larger copy: other packs copy whole conditionings, whose ControlNets share the engine
            copied = copy.copy(self)
            copied.patcher = copy.deepcopy(self.patcher, memo)
            return copied
        # ComfyUI copies a network by itself to run it on a second GPU; an engine is on one device, so native goes there
        return copy.deepcopy(self.native)


def count_control_as_native(control: ControlBase, label: str, node_id: str, fallback: Fallback) -> ControlBase:
    """Return a copy of a CONTROL_NET whose calls are counted as native for a reason.

    Controls of other packs are returned as given, since their networks may be of any kind. So are T2I-adapters, which
    compute once per picture, and Control-LoRAs, which have no network yet.
    """
    ours = type(control).__module__ == ControlNet.__module__
    if not ours or not isinstance(control, ControlNet) or is_lora(control):
        return control
    counted = control.copy()
    counted.control_model = CountedNetwork(control.control_model, label, node_id, fallback)
    return counted


class CountedNetwork(InPlaceOfNative):
    """Takes the place of ``ControlNet.control_model``: native's network, whose calls are counted."""

    def __init__(self, native: Any, *counted_as: Any):
        self.native = native.native if isinstance(native, CountedNetwork) else native
        self._counted_as = counted_as

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        label, node_id, fallback = self._counted_as
        stats = open_stats(Role.CONTROLNET.value, label, node_id, device=kwargs["x"].device)
        stats.count_native(fallback)
        with timed(stats.times):
            return self.native(*args, **kwargs)
