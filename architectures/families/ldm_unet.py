"""ComfyUI's UNetModel as an engine: SD1.5, SD2, SDXL and its refiner differ in their layers and in taking ``y``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

from .. import Role
from ..calls import Binding, EngineCall, ResidualLayout, Unsupported
from ..fused_linear import FusedLinear
from ..kept_tokens import PLACE, TokensOfCall, kept_in
from ..shapes import Dim, TensorSpec
from ..sizes import LatentSizes
from . import ldm

EARLIER = Dim("E")
"""Earlier frames whose tokens a call is given."""


@dataclass(frozen=True)
class UNetArchitecture(LatentSizes):
    """A UNet that takes the latent, timesteps, prompt, ``y`` if the family has it, and one tensor per residual.

    Residuals are inputs named ``control_output_<i>`` and ``control_middle_0``, and ``control_input_<i>`` where
    T2I-adapters act; zeros mean that there is none.

    Attributes:
        adapter_blocks: the input blocks behind which the family's T2I-adapters act.
        keeps_tokens: whether it also takes the tokens of earlier frames, and gives its own; see ``kept_tokens``. Live
            weights alone do so, and nothing is compiled.
    """

    name: str
    takes_y: bool
    adapter_blocks: tuple[int, ...] = ()
    keeps_tokens: bool = False

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
        specs = [x, *ldm.conditioning_specs(module, dtype), *residuals, *adapters]
        if self.keeps_tokens:
            specs.append(TensorSpec("earlier", dtype, (EARLIER,)))  # its size tells how many there are
            specs += ldm.token_specs(module, dtype, "earlier_", EARLIER)
        return specs

    def outputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        out = TensorSpec("out", dtype, (ldm.BATCH, module.out_channels, ldm.HEIGHT, ldm.WIDTH))
        return [out, *(ldm.token_specs(module, dtype, "tokens_") if self.keeps_tokens else ())]

    def function(self, module: UNetModel) -> torch.nn.Module:
        layers = len(ldm.token_dims(module)) if self.keeps_tokens else 0
        return _UNetFunction(module, self.takes_y, self._adapter_blocks(module), layers)

    def fuse_layers(self, module: UNetModel) -> list[FusedLinear]:
        # with tokens of earlier frames keys take more than queries do, and the weights stay those of the other engine
        return [] if self.keeps_tokens else ldm.fuse_layers(module)

    def keeping_tokens(self, module: UNetModel) -> UNetArchitecture | None:
        """Return the same for calls that attend to earlier frames; None where a network cannot."""
        able = ldm.token_dims(module)
        return replace(self, name=f"{self.name}_kept", keeps_tokens=True) if able else None

    def binding(self, module: UNetModel) -> Binding:
        blocks = range(len(module.input_blocks))
        adapters = [f"control_input_{i}" if i in self.adapter_blocks else None for i in blocks]
        bind = partial(_bind, ResidualLayout({**ldm.residual_places(module, "control_"), "input": adapters}))
        return partial(_bind_kept, bind) if self.keeps_tokens else bind

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


def _bind_kept(bind: Binding, call: Mapping[str, Any]) -> EngineCall:
    kept = kept_in((call.get("transformer_options") or {}).get("patches", {}))
    if kept is None:
        raise Unsupported("nothing remembers earlier frames")
    bound, x = bind(call), call["x"]
    (bound.inputs["earlier"], earlier), finish = kept.before(x), bound.finish
    bound.inputs |= {f"earlier_{number}": tokens for number, tokens in enumerate(earlier)}

    def finish_and_keep(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        kept.keep(x, [tokens for name, tokens in outputs.items() if name != "out"])
        return finish(outputs)

    bound.finish = finish_and_keep
    return bound


_ARGUMENTS = frozenset({*UNetArchitecture.arguments, "crossattn_controlnet"})
"""Arguments that a call may carry. The last one is a prompt for ControlNets alone; native's UNet ignores it."""


class _UNetFunction(torch.nn.Module):
    def __init__(self, unet: UNetModel, takes_y: bool, adapter_blocks: list[int], layers: int):
        """
        Args:
            layers: those that take the tokens of earlier frames and give their own; 0 where none does.
        """
        super().__init__()
        self.unet = unet
        self.takes_y = takes_y
        self.adapter_blocks = adapter_blocks
        self.layers = layers

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, *rest: torch.Tensor) -> tuple:
        y, rest = (rest[0], rest[1:]) if self.takes_y else (None, rest)
        options, tokens = ldm.transformer_options(), TokensOfCall(rest[len(rest) - self.layers :])
        if self.layers:
            rest, options["patches"] = rest[: -self.layers - 1], {PLACE: [tokens]}
        blocks = len(self.unet.input_blocks)
        adapters = dict(zip(self.adapter_blocks, rest[blocks + 1 :], strict=True))
        control = {
            "input": [adapters.get(i) for i in reversed(range(blocks))],
            "output": list(rest[:blocks]),
            "middle": [rest[blocks]],
        }
        # _forward, not forward: wrappers of the user's graph have no place in the engine
        return (self.unet._forward(x, timesteps, context, y, control, options), *tokens.tokens)
