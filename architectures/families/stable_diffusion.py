"""UNets and ControlNets of Stable Diffusion as engines.

* SD1.5: no vector conditioning. SD2 has the same layout.
* SDXL, its refiner and its union ControlNets included: vector conditioning ``y``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

from .. import Role
from ..calls import (
    Binding,
    EngineCall,
    OtherKind,
    PerImagePass,
    ResidualLayout,
    Unsupported,
    prompt_of,
    refuse_all_but,
)
from ..kept_tokens import PLACE, TokensOfCall, kept_in
from ..shapes import Dim, Range, RequestedSizes, Sizes, TensorSpec
from ..sizes import LatentSizes
from . import ldm
from .unet_blocks import FREE, blocks_of

EARLIER = Dim("E")
"""The number of earlier frames whose tokens a call has."""


@dataclass(frozen=True)
class UNetArchitecture(LatentSizes):
    """A UNet that takes the latent, timesteps, prompt, ``y`` if the family has it, and a tensor per residual.

    Residuals are inputs named ``control_output_<i>`` and ``control_middle_0``, and ``control_input_<i>`` where
    T2I-adapters act; zeros mean that there is none.

    Attributes:
        adapter_blocks: the input blocks behind which the family's T2I-adapters act.
        keeps_tokens: whether it also takes the tokens of earlier frames, and gives its own; see ``kept_tokens``. Only
            live weights serve such calls, without compiled files.
    """

    name: str
    takes_y: bool
    adapter_blocks: tuple[int, ...] = ()
    keeps_tokens: bool = False

    role = Role.BACKBONE
    timestep_per_image = True
    arguments = ("x", "timesteps", "context", "y", "control", "transformer_options")

    @property
    def free(self) -> Mapping[str, Range]:
        return {} if self.keeps_tokens else FREE

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is UNetModel
            and not hasattr(module, "heatmap_head")
            and ldm.is_plain_2d(module, takes_y=self.takes_y)
        )

    def inputs(self, module: UNetModel, dtype: str) -> list[TensorSpec]:
        x = TensorSpec("x", dtype, (ldm.BATCH, module.in_channels, ldm.HEIGHT, ldm.WIDTH))
        residuals = ldm.residual_specs(module, dtype, "control_", optional=True)
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

    def keeping_tokens(self, module: UNetModel) -> UNetArchitecture | None:
        """Return the architecture of calls that attend to earlier frames; None for a network that cannot."""
        able = ldm.token_dims(module)
        return replace(self, name=f"{self.name}_kept", keeps_tokens=True) if able else None

    def binding(self, module: UNetModel) -> Binding:
        blocks = range(len(module.input_blocks))
        adapters = [f"control_input_{i}" if i in self.adapter_blocks else None for i in blocks]
        bind = partial(_bind_unet, ResidualLayout({**ldm.residual_places(module, "control_"), "input": adapters}))
        return partial(_bind_kept, bind) if self.keeps_tokens else bind

    def _adapter_blocks(self, module: UNetModel) -> list[int]:
        return [block for block in self.adapter_blocks if block < len(module.input_blocks)]


def _bind_unet(layout: ResidualLayout, call: Mapping[str, Any]) -> EngineCall:
    x, context, options = call["x"], prompt_of(call), call.get("transformer_options")
    refuse_all_but(call, _TAKEN)
    inputs = layout.take(call.get("control"), x.shape[0])
    residuals = frozenset(inputs)
    inputs["x"], inputs["timesteps"], inputs["context"] = x, call.get("timesteps"), context
    if (y := call.get("y")) is not None:
        inputs["y"] = y

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if options is not None:
            options["original_shape"] = list(x.shape)  # as native does, for other nodes
        return outputs["out"].to(x.device, x.dtype)

    return EngineCall(inputs, finish, residuals=residuals)


def _bind_kept(bind: Binding, call: Mapping[str, Any]) -> EngineCall:
    kept = kept_in((call.get("transformer_options") or {}).get("patches", {}))
    if kept is None:
        raise Unsupported("no memory of earlier frames, which this engine needs")
    bound, x = bind(call), call["x"]
    (bound.inputs["earlier"], earlier), finish = kept.before(x), bound.finish
    bound.inputs |= {f"earlier_{number}": tokens for number, tokens in enumerate(earlier)}

    def finish_and_keep(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        kept.keep(x, [tokens for name, tokens in outputs.items() if name != "out"])
        return finish(outputs)

    bound.finish = finish_and_keep
    return bound


_TAKEN = frozenset({*UNetArchitecture.arguments, "crossattn_controlnet"})
"""Arguments that a call may carry. The last one is a prompt for ControlNets alone; native's UNet ignores it."""


class _UNetFunction(torch.nn.Module):
    def __init__(self, unet: UNetModel, takes_y: bool, adapter_blocks: list[int], layers: int):
        """
        Args:
            layers: the number of layers that take the tokens of earlier frames and give their own.

        ``before_late`` is the last layer before residuals are used.
        """
        super().__init__()
        self.unet = unet
        self.takes_y = takes_y
        self.adapter_blocks = adapter_blocks
        self.layers = layers
        self.blocks = () if layers else blocks_of(unet)
        self.before_late = (unet.middle_block or unet.input_blocks[-1])[-1]

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


TYPE_EMBEDDING = "control_type_embedding"


@dataclass(frozen=True)
class ControlNetArchitecture(LatentSizes):
    """A ControlNet that takes the latent, hint, timesteps, prompt and ``y``, and gives a tensor per residual.

    The hint has a batch of its own, 1 or the latent's: ComfyUI passes a single image for the whole batch. Its encoder
    is a per-image pass. In a union ControlNet the pass depends on the control's type, and also gives its embedding.
    """

    name: str
    takes_y: bool

    role = Role.CONTROLNET
    free = FREE
    arguments = ("x", "hint", "timesteps", "context", "y")

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ControlNet and ldm.is_plain_2d(module, self.takes_y)

    def inputs(self, module: ControlNet, dtype: str) -> list[TensorSpec]:
        x = TensorSpec("x", dtype, (ldm.BATCH, module.in_channels, ldm.HEIGHT, ldm.WIDTH))
        return [x, _hint_spec(module, dtype), *ldm.conditioning_specs(module, dtype)]

    def outputs(self, module: ControlNet, dtype: str) -> list[TensorSpec]:
        return ldm.residual_specs(module, dtype)

    def function(self, module: ControlNet) -> torch.nn.Module:
        return _ControlNetFunction(module)

    def passes(self, module: ControlNet) -> list[PerImagePass]:
        takes = _hint_spec(module, str(module.dtype).removeprefix("torch."))
        if module.control_add_embedding is None:
            per_image_pass = PerImagePass(takes, ("hint",), _HintEncoder(module.input_hint_block))
        else:
            per_image_pass = PerImagePass(takes, ("hint", TYPE_EMBEDDING), _UnionHintEncoder(module))
            module.transformer_layes = module.spatial_ch_projs = module.control_add_embedding = torch.nn.Identity()
        module.input_hint_block = torch.nn.Identity()  # a class of torch: the copy may be on its way to another process
        return [per_image_pass]

    def engine_inputs(self, module: ControlNet, dtype: str) -> list[TensorSpec]:
        last = [layer for layer in module.input_hint_block if isinstance(layer, torch.nn.Conv2d)][-1]
        encoded = TensorSpec("hint", dtype, (ldm.HINT_BATCH, last.out_channels, ldm.HEIGHT, ldm.WIDTH), sample="unit")
        specs = [encoded if spec.name == "hint" else spec for spec in self.inputs(module, dtype)]
        if module.control_add_embedding is not None:
            specs.append(TensorSpec(TYPE_EMBEDDING, dtype, (1, module.time_embed[-1].out_features)))
        return specs

    def binding(self, module: ControlNet) -> Binding:
        layout = ResidualLayout(ldm.residual_places(module))
        return partial(_bind_controlnet, layout, self.takes_y, module.control_add_embedding is not None)


def _bind_controlnet(layout: ResidualLayout, takes_y: bool, is_union: bool, call: Mapping[str, Any]) -> EngineCall:
    x = call["x"]
    inputs = {"x": x, "hint": call["hint"], "timesteps": call["timesteps"], "context": call["context"]}
    if takes_y:  # else it is ignored, as in native
        if (y := call.get("y")) is None:
            raise OtherKind("no pooled prompt (y), which this model needs")
        inputs["y"] = y
    extras = {"hint": tuple(call.get("control_type") or ())} if is_union else {}
    return EngineCall(inputs, lambda outputs: layout.give(outputs, x), extras)


def _hint_spec(module: ControlNet, dtype: str) -> TensorSpec:
    convs = [layer for layer in module.input_hint_block if isinstance(layer, torch.nn.Conv2d)]
    scale = 1
    for conv in convs:
        scale *= conv.stride[0]
    size = (Dim("H", up=scale), Dim("W", up=scale))
    return TensorSpec("hint", dtype, (ldm.HINT_BATCH, convs[0].in_channels, *size), sample="unit")


class _ControlNetFunction(torch.nn.Module):
    """A ControlNet without its per-image passes; or a whole ControlNet, if it is no union."""

    def __init__(self, controlnet: ControlNet):
        super().__init__()
        ldm.use_attention(controlnet)
        if isinstance(controlnet.input_hint_block, torch.nn.Identity):
            controlnet.input_hint_block = _AsGiven()
        self.is_union = controlnet.control_add_embedding is not None
        if self.is_union:
            controlnet.control_add_embedding = _Remembered()
        self.controlnet = controlnet
        self.blocks = blocks_of(controlnet)

    def forward(self, x: torch.Tensor, hint: torch.Tensor, timesteps: torch.Tensor, *cond: torch.Tensor) -> tuple:
        if self.is_union:
            *cond, self.controlnet.control_add_embedding.value = cond
        residuals = self.controlnet(x, hint, timesteps, *cond)
        return (*residuals["output"], *residuals["middle"])


class _HintEncoder(torch.nn.Module):
    """The hint block as a function of the hint alone: it uses neither embedding nor prompt."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, hint: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.block(hint, None, None),)


class _UnionHintEncoder(torch.nn.Module):
    """Hint encoder of a union ControlNet: gives the features of a hint and the embedding of its types.

    ``ControlNet.union_controlnet_merge`` computes the features, and uses neither its embedding nor its prompt.
    """

    merge = ControlNet.union_controlnet_merge

    def __init__(self, controlnet: ControlNet):
        super().__init__()
        self._parameters = controlnet._parameters  # shared: live weights are written there
        self.num_control_type = controlnet.num_control_type
        self.input_hint_block = controlnet.input_hint_block
        self.transformer_layes = controlnet.transformer_layes
        self.spatial_ch_projs = controlnet.spatial_ch_projs
        self.control_add_embedding = controlnet.control_add_embedding

    def forward(self, hint: torch.Tensor, control_type: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if any(number >= self.num_control_type for number in control_type):
            raise Unsupported("a control type that this union ControlNet does not have")
        embedding = self.control_add_embedding(list(control_type), hint.dtype, hint.device)
        if not control_type:
            return self.input_hint_block(hint, None, None), embedding
        return self.merge(hint.unsqueeze(0), list(control_type), None, None), embedding


class _AsGiven(torch.nn.Module):
    """Replaces the hint block, and returns the encoded hint."""

    def forward(self, encoded: torch.Tensor, *_: object) -> torch.Tensor:
        return encoded


class _Remembered(torch.nn.Module):
    """Replaces a union ControlNet's type embedding, and returns ``value``, which is set before each call."""

    value: torch.Tensor

    def forward(self, *_: object) -> torch.Tensor:
        return self.value


SD15 = Sizes("SD1.5", 256, 512, 1024)
SDXL = Sizes("SDXL", 512, 1024, 1536)

PRESETS = {
    "presetSdxl": ("SDXL", RequestedSizes(640, 1024, 1536, 1, 231)),
    "presetSd15": ("SD 1.5", RequestedSizes(256, 512, 1024, 1, 231)),
}
"""Choices of the page: all usual formats of a family. A user's settings keep these keys."""

FILE_MARKS = (
    "input_blocks.0.0.weight", "input_hint_block.0.weight", "down_blocks.0.resnets.0.", "controlnet_cond_embedding.",
)
"""Parts of tensors' names in the files of these families, in Stability's layout and in that of Diffusers."""

NEEDS = (
    "comfy.ldm.modules.attention:BasicTransformerBlock",
    "comfy.ldm.modules.attention:CrossAttention",
    "comfy.ldm.modules.attention:SpatialTransformer",
    "comfy.ldm.modules.diffusionmodules.openaimodel:Downsample",
    "comfy.ldm.modules.diffusionmodules.openaimodel:ResBlock",
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel._forward"
    "(self, x, timesteps, context, y, control, transformer_options, **)",
    "comfy.cldm.cldm:ControlNet.forward(self, x, hint, timesteps, context, y, **)",
)

ARCHITECTURES = (
    UNetArchitecture(SD15, "sd15_unet", takes_y=False, adapter_blocks=(2, 5, 8, 11)),
    ControlNetArchitecture(SD15, "sd15_controlnet", takes_y=False),
    UNetArchitecture(SDXL, "sdxl_unet", takes_y=True, adapter_blocks=(3, 5, 8)),
    ControlNetArchitecture(SDXL, "sdxl_controlnet", takes_y=True),
)
