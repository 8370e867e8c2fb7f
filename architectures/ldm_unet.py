"""ComfyUI's UNetModel as an engine: SD1.5, SD2, SDXL and its refiner differ in their layers and in taking ``y``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

from . import Role, ldm
from .calls import Binding, EngineCall, ResidualLayout, Unsupported
from .fused_linear import FusedLinear
from .image_latent import LatentSizes
from .shapes import TensorSpec


@dataclass(frozen=True)
class UNetArchitecture(LatentSizes):
    """A UNet that takes the latent, timesteps, prompt, ``y`` if the family has it, and one tensor per residual.

    Residuals are inputs named ``control_output_<i>`` and ``control_middle_0``, and ``control_input_<i>`` where
    T2I-adapters act; zeros mean that there is none.

    Attributes:
        adapter_blocks: the input blocks behind which the family's T2I-adapters act.
    """

    name: str
    takes_y: bool
    adapter_blocks: tuple[int, ...] = ()

    role = Role.BACKBONE
    timestep_per_image = True
    arguments = ("x", "timesteps", "context", "y", "control", "transformer_options")

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is UNetModel
            and not hasattr(module, "heatmap_head")
            and ldm.is_plain_2d(module, takes_y=self.takes_y)
        )

    def inputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        x = TensorSpec("x", dtype, (ldm.BATCH, module.in_channels, ldm.HEIGHT, ldm.WIDTH))
        residuals = [replace(s, late=True) for s in ldm.residual_specs(module, dtype, "control_", optional=True)]
        skips = ldm.skip_dims(module)
        blocks = self._adapter_blocks(module)
        adapters = [ldm.residual_spec(f"control_input_{i}", dtype, skips[i], optional=True) for i in blocks]
        return [x, *ldm.conditioning_specs(module, dtype), *residuals, *adapters]

    def outputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (ldm.BATCH, module.out_channels, ldm.HEIGHT, ldm.WIDTH))]

    def function(self, module: UNetModel) -> torch.nn.Module:
        return _UNetFunction(module, self.takes_y, self._adapter_blocks(module))

    def fuse_layers(self, module: UNetModel) -> list[FusedLinear]:
        return ldm.fuse_layers(module)

    def passes(self, module: UNetModel) -> list:
        return []

    def engine_inputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        return self.inputs(module, dtype)

    def binding(self, module: UNetModel) -> Binding:
        blocks = range(len(module.input_blocks))
        adapters = [f"control_input_{i}" if i in self.adapter_blocks else None for i in blocks]
        return partial(_bind, ResidualLayout({**ldm.residual_places(module, "control_"), "input": adapters}))

    def _adapter_blocks(self, module: UNetModel) -> list[int]:
        return [block for block in self.adapter_blocks if block < len(module.input_blocks)]


def _bind(layout: ResidualLayout, call: Mapping[str, Any]) -> EngineCall:
    x, context, options = call["x"], call.get("context"), call.get("transformer_options")
    if context is None:
        raise Unsupported("there is no prompt")
    if not _ARGUMENTS.issuperset(call):
        for name in call.keys() - _ARGUMENTS:
            if call[name] is not None:
                raise Unsupported(name)
    inputs = layout.take(call.get("control"), x.shape[0])
    residuals = frozenset(inputs)
    inputs["x"], inputs["timesteps"], inputs["context"] = x, call.get("timesteps"), context
    if (y := call.get("y")) is not None:
        inputs["y"] = y

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if options is not None:
            options["original_shape"] = list(x.shape)  # native leaves it there for others to read
        return outputs["out"].to(x.device, x.dtype)

    return EngineCall(inputs, finish, residuals=residuals)


_ARGUMENTS = frozenset({*UNetArchitecture.arguments, "crossattn_controlnet"})
"""Arguments that a call may carry. The last one is a prompt for ControlNets alone; native's UNet ignores it."""


class _UNetFunction(torch.nn.Module):
    def __init__(self, unet: UNetModel, takes_y: bool, adapter_blocks: list[int]):
        super().__init__()
        self.unet = unet
        self.takes_y = takes_y
        self.adapter_blocks = adapter_blocks

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, *rest: torch.Tensor) -> tuple:
        y, rest = (rest[0], rest[1:]) if self.takes_y else (None, rest)
        blocks = len(self.unet.input_blocks)
        adapters = dict(zip(self.adapter_blocks, rest[blocks + 1 :], strict=True))
        control = {
            "input": [adapters.get(i) for i in reversed(range(blocks))],
            "output": list(rest[:blocks]),
            "middle": [rest[blocks]],
        }
        # _forward, not forward: wrappers of the user's graph have no place in the engine
        return (self.unet._forward(x, timesteps, context, y, control, ldm.transformer_options()),)
