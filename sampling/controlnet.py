"""An engine-backed CONTROL_NET: ComfyUI's own ControlNet object with an engine where its network was.

The object stays exactly ``comfy.controlnet.ControlNet``, so copying, chaining, strengths, ranges, masks and other packs
that convert ControlNets treat it as any other.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management
from comfy.controlnet import ControlNet

from ..architectures.calls import Control
from ..comfy_model.network import NativeNetwork
from .engine_handle import EngineHandle
from .hint_cache import KeptHints
from .nan_guard import watched
from .native_network import arguments_of, by_name

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def native_controlnet(controlnet: ControlNet) -> ControlNet:
    """The native CONTROL_NET behind an engine-backed one, or the one given."""
    if isinstance(getattr(controlnet, "control_model", None), EngineControlModel):
        native = controlnet.copy()
        native.control_model = controlnet.control_model.native
        native.control_model_wrapped = controlnet.control_model.native_patcher
        return native
    return controlnet


def back_with_engine(controlnet: ControlNet, handle: EngineHandle) -> ControlNet:
    """A copy of a native CONTROL_NET that runs on the handle's engine whenever it can serve a call."""
    backed = controlnet.copy()
    backed.control_model = EngineControlModel(handle, controlnet)
    # what get_models() tells ComfyUI to load: the engine, or native in its place, as it turns out when ComfyUI plans
    backed.control_model_wrapped = handle.patcher
    return backed


class EngineControlModel:
    """Takes the place of ``ControlNet.control_model``: same call, same result, computed by an engine or by native."""

    def __init__(self, handle: EngineHandle, controlnet: ControlNet):
        self.native: torch.nn.Module = controlnet.control_model
        self.native_patcher: ModelPatcher = controlnet.control_model_wrapped
        self.handle = handle
        self.hints = KeptHints()
        self._arguments = arguments_of(handle.network)

    @property
    def network(self) -> NativeNetwork:
        return self.handle.network

    @property
    def dtype(self) -> torch.dtype:
        """What ComfyUI casts inputs to: native's, so that a fallback gets what native expects."""
        return self.native.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Control:
        """One call of the ControlNet, with native's arguments.

        Returns:
            Residuals as native gives them, in tensors that may be written to: ComfyUI multiplies them by the strength
            in place. On its session's own stream they are lent until the next call.
        """
        call = by_name(self._arguments, args, kwargs)
        served, residuals = self.handle.serve(None, lambda: watched(self.handle.bind(call)))
        if served:
            return residuals
        self._make_native_resident()
        return self.handle.native(lambda: self.native(*args, **kwargs))

    def _make_native_resident(self) -> None:
        """Have native weights loaded, beside all that is in use: ComfyUI loaded the engine in their place.

        Looked at in every call: ComfyUI may take them again between two sampling runs of one node, or within one.
        """
        if not any(loaded is self.native_patcher for loaded in model_management.loaded_models()):
            in_use = model_management.loaded_models(only_currently_used=True)
            model_management.load_models_gpu([*in_use, self.native_patcher])

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module | EngineControlModel:
        if memo:  # a part of what is copied: other packs copy whole conditionings, whose ControlNets share the engine
            return self
        # ComfyUI copies a network by itself to run it on a second GPU; an engine is on one device, so native goes there
        return copy.deepcopy(self.native)
