"""Stand-ins for packs that change models behind ComfyUI's back: its functions, layers during a run, weights."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

_MODULES = {
    "openaimodel": "comfy.ldm.modules.diffusionmodules.openaimodel",
    "attention": "comfy.ldm.modules.attention",
    "cldm": "comfy.cldm.cldm",
}
PLACES = (
    "openaimodel.apply_control", "openaimodel.forward_timestep_embed", "openaimodel.ResBlock._forward",
    "attention.BasicTransformerBlock.forward", "openaimodel.UNetModel._forward", "cldm.ControlNet.forward",
    "openaimodel.timestep_embedding",
)  # fmt: skip

_before: dict[str, Any] = {}


def _scaled(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result * 0.9
    return {name: [_scaled(part) for part in parts] for name, parts in result.items()}


def replace_code(model: object, place: str, how: str) -> object:
    """Put a function in the place of one of ComfyUI's for all models, which scales its result, or take it back."""
    module, *path, name = place.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(_MODULES[module]))
    own = _before.setdefault(place, getattr(owner, name))

    @functools.wraps(own)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return _scaled(own(*args, **kwargs))

    setattr(owner, name, {"scaled": scaled, "resizing": _resizing, "ComfyUI's": own}[how])
    return model


def _resizing(h: torch.Tensor, control: dict | None, name: str) -> torch.Tensor:
    """As packs have it that sample at several sizes: what does not fit is resized, the rest is added as it is."""
    parts = None if control is None else control.get(name)
    if not parts or (part := parts.pop()) is None:
        return h
    if part.shape[-2:] != h.shape[-2:]:
        part = torch.nn.functional.interpolate(part, size=h.shape[-2:])
    return h + part


def changed_in_steps(model: Any, what: str, above: float) -> Any:
    """Change a layer of the UNet for the calls above a sigma, and change it back for the others."""
    changed = model.clone()

    def step(call: Callable, given: dict) -> torch.Tensor:
        layer = changed.model.diffusion_model.middle_block[0]
        if float(given["timestep"].max()) <= above:
            return call(given["input"], given["timestep"], **given["c"])
        own = layer.forward
        handle = layer.register_forward_hook(lambda _l, _a, result: result * 0.5) if what == "hook" else None
        if what == "method":
            layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5
        try:
            return call(given["input"], given["timestep"], **given["c"])
        finally:
            if handle is not None:
                handle.remove()
            layer.__dict__.pop("forward", None)

    changed.set_model_unet_function_wrapper(step)
    return changed


def edit_weights(model: Any, how: str) -> Any:
    """Halve the weights of the UNet's middle without a patch."""
    for layer in model.model.diffusion_model.middle_block.modules():
        if isinstance(getattr(layer, "weight", None), torch.nn.Parameter):
            if how == "in place":
                layer.weight.data.mul_(0.5)
            else:
                layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5, requires_grad=False)
    return model
