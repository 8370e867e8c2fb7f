"""ComfyUI's cldm ControlNet as an engine, for SD1.5, SD2 and SDXL alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from comfy.cldm.cldm import ControlNet

from . import ldm
from .tensors import Dim, Sizes, TensorSpec


@dataclass(frozen=True)
class ControlNetArchitecture:
    """A ControlNet that takes the latent, hint, timesteps, prompt and ``y``, and gives one tensor per residual.

    The hint has a batch of its own (1, or that of the latent): ComfyUI hands one image to a whole batch.
    """

    name: str
    takes_y: bool
    sizes: Sizes
    kind: str = "controlnet"

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ControlNet and module.task_embedding is None and ldm.is_plain_2d(module, self.takes_y)

    def inputs(self, module: ControlNet, dtype: str) -> list[TensorSpec]:
        convs = [layer for layer in module.input_hint_block if isinstance(layer, torch.nn.Conv2d)]
        scale = 1
        for conv in convs:
            scale *= conv.stride[0]
        height, width = Dim("H", up=scale), Dim("W", up=scale)
        return [
            TensorSpec("x", dtype, (ldm.BATCH, module.in_channels, ldm.HEIGHT, ldm.WIDTH)),
            TensorSpec("hint", dtype, (ldm.HINT_BATCH, convs[0].in_channels, height, width)),
            *ldm.conditioning_specs(module, dtype),
        ]

    def outputs(self, module: ControlNet, dtype: str) -> list[TensorSpec]:
        return ldm.residual_specs(module, dtype)

    def function(self, module: ControlNet) -> torch.nn.Module:
        return _ControlNetFunction(module)

    def hint_encoder(self, module: ControlNet) -> torch.nn.Module:
        encoder = _HintEncoder(module.input_hint_block)
        module.input_hint_block = _AsGiven()
        return encoder

    def encoded_inputs(self, module: ControlNet, dtype: str) -> list[TensorSpec]:
        last = [layer for layer in module.input_hint_block if isinstance(layer, torch.nn.Conv2d)][-1]
        encoded = TensorSpec("hint", dtype, (ldm.HINT_BATCH, last.out_channels, ldm.HEIGHT, ldm.WIDTH))
        return [encoded if spec.name == "hint" else spec for spec in self.inputs(module, dtype)]


class _ControlNetFunction(torch.nn.Module):
    def __init__(self, controlnet: ControlNet):
        super().__init__()
        ldm.use_sdpa(controlnet)
        self.controlnet = controlnet

    def forward(self, x: torch.Tensor, hint: torch.Tensor, timesteps: torch.Tensor, *cond: torch.Tensor) -> tuple:
        residuals = self.controlnet(x, hint, timesteps, *cond)
        return (*residuals["output"], *residuals["middle"])


class _HintEncoder(torch.nn.Module):
    """The hint block as a function of the hint: it takes an embedding and a prompt, and uses neither."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, hint: torch.Tensor) -> torch.Tensor:
        return self.block(hint, None, None)


class _AsGiven(torch.nn.Module):
    """Stands where the hint block was, and hands on what the block made before."""

    def forward(self, encoded: torch.Tensor, *_: object) -> torch.Tensor:
        return encoded
