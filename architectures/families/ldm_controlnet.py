"""ComfyUI's cldm ControlNet as an engine, for SD1.5, SD2 and SDXL alike, union ControlNets among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from comfy.cldm.cldm import ControlNet

from .. import Role
from ..calls import Binding, EngineCall, OtherKind, PerImagePass, ResidualLayout, Unsupported
from ..fused_linear import FusedLinear
from ..shapes import Dim, TensorSpec
from ..sizes import LatentSizes
from . import ldm

TYPE_EMBEDDING = "control_type_embedding"


@dataclass(frozen=True)
class ControlNetArchitecture(LatentSizes):
    """A ControlNet that takes the latent, hint, timesteps, prompt and ``y``, and gives one tensor per residual.

    The hint has a batch of its own (1, or that of the latent): ComfyUI hands one image to a whole batch. Its encoder is
    a per-image pass. That of a union ControlNet depends on the control's type and also gives the type's embedding.
    """

    name: str
    takes_y: bool

    role = Role.CONTROLNET
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

    def fuse_layers(self, module: ControlNet) -> list[FusedLinear]:
        return ldm.fuse_layers(module)

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
        return partial(_bind, layout, self.takes_y, module.control_add_embedding is not None)


def _bind(layout: ResidualLayout, takes_y: bool, is_union: bool, call: Mapping[str, Any]) -> EngineCall:
    x = call["x"]
    inputs = {"x": x, "hint": call["hint"], "timesteps": call["timesteps"], "context": call["context"]}
    if takes_y:  # the others ignore it, as native does
        if (y := call.get("y")) is None:
            raise OtherKind("there is no vector conditioning (y); the model is of another family")
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
    """A ControlNet whose per-image passes were taken out, or a whole one that is not of the union kind."""

    def __init__(self, controlnet: ControlNet):
        super().__init__()
        ldm.use_sdpa(controlnet)
        if isinstance(controlnet.input_hint_block, torch.nn.Identity):
            controlnet.input_hint_block = _AsGiven()
        self.is_union = controlnet.control_add_embedding is not None
        if self.is_union:
            controlnet.control_add_embedding = _Remembered()
        self.controlnet = controlnet

    def forward(self, x: torch.Tensor, hint: torch.Tensor, timesteps: torch.Tensor, *cond: torch.Tensor) -> tuple:
        if self.is_union:
            *cond, self.controlnet.control_add_embedding.value = cond
        residuals = self.controlnet(x, hint, timesteps, *cond)
        return (*residuals["output"], *residuals["middle"])


class _HintEncoder(torch.nn.Module):
    """The hint block as a function of the hint: it takes an embedding and a prompt, and uses neither."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, hint: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.block(hint, None, None),)


class _UnionHintEncoder(torch.nn.Module):
    """Hint encoder of a union ControlNet: gives the features of a hint and the embedding of its types.

    ``ControlNet.union_controlnet_merge`` does the first, and uses neither the embedding nor the prompt that it takes.
    """

    merge = ControlNet.union_controlnet_merge

    def __init__(self, controlnet: ControlNet):
        super().__init__()
        self._parameters = controlnet._parameters  # the task embedding: whoever follows weights writes it there
        self.num_control_type = controlnet.num_control_type
        self.input_hint_block = controlnet.input_hint_block
        self.transformer_layes = controlnet.transformer_layes
        self.spatial_ch_projs = controlnet.spatial_ch_projs
        self.control_add_embedding = controlnet.control_add_embedding

    def forward(self, hint: torch.Tensor, control_type: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if any(number >= self.num_control_type for number in control_type):
            raise Unsupported("a control type that this union ControlNet has not")
        embedding = self.control_add_embedding(list(control_type), hint.dtype, hint.device)
        if not control_type:
            return self.input_hint_block(hint, None, None), embedding
        return self.merge(hint.unsqueeze(0), list(control_type), None, None), embedding


class _AsGiven(torch.nn.Module):
    """Stands where the hint block was, and hands on what the block made before."""

    def forward(self, encoded: torch.Tensor, *_: object) -> torch.Tensor:
        return encoded


class _Remembered(torch.nn.Module):
    """Stands where a union ControlNet's type embedding was, and gives what it is told before each call."""

    value: torch.Tensor

    def forward(self, *_: object) -> torch.Tensor:
        return self.value
