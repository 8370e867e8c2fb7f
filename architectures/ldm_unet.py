"""ComfyUI's UNetModel as an engine: SD1.5, SD2 and SDXL differ only in their layers and in taking ``y`` or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

from . import ldm
from .tensors import Sizes, TensorSpec


@dataclass(frozen=True)
class UNetArchitecture:
    """A UNet that takes the latent, timesteps, prompt, ``y`` if the family has it, and one tensor per residual.

    Residuals are inputs named ``control_output_<i>`` and ``control_middle_0``; zeros mean "no ControlNet".
    """

    name: str
    takes_y: bool
    sizes: Sizes
    kind: str = "unet"

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is UNetModel
            and not hasattr(module, "heatmap_head")
            and ldm.is_plain_2d(module, takes_y=self.takes_y)
        )

    def inputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        x = TensorSpec("x", dtype, (ldm.BATCH, module.in_channels, ldm.HEIGHT, ldm.WIDTH))
        residuals = ldm.residual_specs(module, dtype, "control_", optional=True)
        return [x, *ldm.conditioning_specs(module, dtype), *residuals]

    def outputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (ldm.BATCH, module.out_channels, ldm.HEIGHT, ldm.WIDTH))]

    def function(self, module: UNetModel) -> torch.nn.Module:
        return _UNetFunction(module, self.takes_y)

    def hint_encoder(self, module: UNetModel) -> None:
        return None

    def encoded_inputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        return self.inputs(module, dtype)


class _UNetFunction(torch.nn.Module):
    def __init__(self, unet: UNetModel, takes_y: bool):
        super().__init__()
        self.unet = unet
        self.takes_y = takes_y

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, *rest: torch.Tensor) -> tuple:
        y, residuals = (rest[0], rest[1:]) if self.takes_y else (None, rest)
        control = {"input": [], "output": list(residuals[:-1]), "middle": [residuals[-1]]}
        # _forward, not forward: wrappers of the user's graph have no place in the engine
        return (self.unet._forward(x, timesteps, context, y, control, ldm.transformer_options()),)
