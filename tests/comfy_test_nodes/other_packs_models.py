"""Stand-ins for packs that change models behind ComfyUI's back: its functions, layers during a run, weights."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from comfy_api.latest import io

CATEGORY = "tests"
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


class TestReplaceCode(io.ComfyNode):
    """Puts a function in the place of one of ComfyUI's for all models, which scales its result, or takes it back."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestReplaceCode", display_name="Test Replace Code", category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Combo.Input("place", options=list(PLACES)),
                    io.Combo.Input("how", options=["scaled", "resizing", "ComfyUI's"])],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """It acts in each prompt."""
        return float("nan")

    @classmethod
    def execute(cls, model: object, place: str, how: str) -> io.NodeOutput:
        module, *path, name = place.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(_MODULES[module]))
        own = _before.setdefault(place, getattr(owner, name))

        @functools.wraps(own)
        def scaled(*args: Any, **kwargs: Any) -> Any:
            return _scaled(own(*args, **kwargs))

        setattr(owner, name, {"scaled": scaled, "resizing": _resizing, "ComfyUI's": own}[how])
        return io.NodeOutput(model)


def _resizing(h: torch.Tensor, control: dict | None, name: str) -> torch.Tensor:
    """As packs have it that sample at several sizes: what does not fit is resized, the rest is added as it is."""
    parts = None if control is None else control.get(name)
    if not parts or (part := parts.pop()) is None:
        return h
    if part.shape[-2:] != h.shape[-2:]:
        part = torch.nn.functional.interpolate(part, size=h.shape[-2:])
    return h + part


class TestChangeInSteps(io.ComfyNode):
    """Changes a layer of the UNet for the calls above a sigma, and changes it back for the others."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestChangeInSteps", display_name="Test Change In Steps", category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Combo.Input("what", options=["hook", "method"]),
                    io.Float.Input("above", default=1.0, min=0.0, max=1000.0, step=0.1)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, what: str, above: float) -> io.NodeOutput:
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
        return io.NodeOutput(changed)


class TestEditWeights(io.ComfyNode):
    """Halves the weights of the UNet's middle without a patch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestEditWeights", display_name="Test Edit Weights", category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Combo.Input("how", options=["in place", "others"])],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, how: str) -> io.NodeOutput:
        for layer in model.model.diffusion_model.middle_block.modules():
            if isinstance(getattr(layer, "weight", None), torch.nn.Parameter):
                if how == "in place":
                    layer.weight.data.mul_(0.5)
                else:
                    layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5, requires_grad=False)
        return io.NodeOutput(model)


NODES = (TestReplaceCode, TestChangeInSteps, TestEditWeights)
