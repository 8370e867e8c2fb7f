"""Tiny networks of ComfyUI's on the CPU, of the families that the pack serves, each with a call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.ops
import torch
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel


@dataclass(frozen=True)
class Tiny:
    """A class of networks, settings for a tiny one, and the shapes of what it is called with."""

    made_by: Callable[..., torch.nn.Module]
    settings: dict[str, Any]
    given: dict[str, tuple[int, ...]]

    def network(self, operations: type = comfy.ops.disable_weight_init, **changes: Any) -> torch.nn.Module:
        """One with weights that depend on their shapes alone."""
        settings = {n: list(v) if isinstance(v, list) else v for n, v in (self.settings | changes).items()}
        made = self.made_by(**settings, operations=operations, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(1)
        for name, parameter in sorted(made.named_parameters()):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + 0.5 * name.endswith(
                "norm.weight"
            )
        return made.eval().requires_grad_(False)

    def call(self, network: torch.nn.Module) -> torch.Tensor:
        """The result of a call that is always the same."""
        generator = torch.Generator().manual_seed(2)
        given = {n: torch.randn(shape, generator=generator) for n, shape in self.given.items()}
        result = network(**given, timesteps=torch.tensor([0.3]))
        return result if isinstance(result, torch.Tensor) else torch.cat([r.flatten() for r in result["output"]])


_LDM = {"image_size": 32, "in_channels": 4, "model_channels": 32, "num_heads": 4, "context_dim": 16,
        "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_middle": 1,
        "use_spatial_transformer": True, "legacy": False}  # fmt: skip
_IMAGE, _CONTEXT = (1, 4, 8, 8), (1, 6, 16)

TINY = {
    "unet": Tiny(
        UNetModel, _LDM | {"out_channels": 4, "transformer_depth_output": [1] * 4}, {"x": _IMAGE, "context": _CONTEXT}
    ),
    "unet of SDXL's kind": Tiny(
        UNetModel,
        _LDM | {"out_channels": 4, "transformer_depth_output": [1] * 4, "use_linear_in_transformer": True,
                "num_head_channels": 8, "num_heads": -1, "num_classes": "sequential", "adm_in_channels": 16},
        {"x": _IMAGE, "context": _CONTEXT, "y": (1, 16)},
    ),
    "controlnet": Tiny(
        ControlNet, _LDM | {"hint_channels": 3}, {"x": _IMAGE, "context": _CONTEXT, "hint": (1, 3, 64, 64)}
    ),
}  # fmt: skip
