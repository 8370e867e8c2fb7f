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

from ..engine_library.native import NativeNetwork
from .engine_handle import EngineHandle

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
        self._takes_y = getattr(self.native, "num_classes", None) is not None

    @property
    def network(self) -> NativeNetwork:
        return self.handle.network

    @property
    def dtype(self) -> torch.dtype:
        """What ComfyUI casts inputs to: native's, so that a fallback gets what native expects."""
        return self.native.dtype

    def __call__(
        self, x: torch.Tensor, hint: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, **extra: Any
    ) -> dict[str, list[torch.Tensor]]:
        """One call of the ControlNet.

        Args:
            x, hint, timesteps, context: (B, C, H, W), (B or 1, C, 8H, 8W), (B,), (B, T, features).
            extra: ``y`` (B, features) for SDXL; the rest is for union nets, and the others ignore it as native does.

        Returns:
            Residuals as native gives them: 'output' from the first input block on, and 'middle'. Fresh tensors:
            ComfyUI multiplies them by the strength in place.
        """
        y = extra.get("y")

        def inputs() -> dict[str, torch.Tensor]:
            given = {"x": x, "hint": hint, "timesteps": timesteps, "context": context}
            if self._takes_y and y is not None:
                given["y"] = y
            return given

        outputs = self.handle.serve(None, inputs)
        if outputs is None:
            self._make_native_resident()
            return self.handle.native(
                lambda: self.native(x=x, hint=hint, timesteps=timesteps, context=context, **extra)
            )
        residuals = [tensor.to(x.device, x.dtype) for tensor in outputs.values()]
        return {"output": residuals[:-1], "middle": residuals[-1:]}

    def _make_native_resident(self) -> None:
        """Have native weights loaded, beside all that is in use: ComfyUI loaded the engine in their place.

        Looked at in every call: ComfyUI may take them again between two sampling runs of one node, or within one.
        """
        if not any(loaded is self.native_patcher for loaded in model_management.loaded_models()):
            in_use = model_management.loaded_models(only_currently_used=True)
            model_management.load_models_gpu([*in_use, self.native_patcher])

    def __deepcopy__(self, memo: dict) -> torch.nn.Module:
        # ComfyUI copies networks to run them on a second GPU; engines belong to one device, so native goes there
        return copy.deepcopy(self.native, memo)
