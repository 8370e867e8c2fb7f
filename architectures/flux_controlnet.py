"""ComfyUI's ControlNets for Flux.1 as engines, those that take the control image as a latent: InstantX and Union."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock

from . import Role
from .calls import Binding, EngineCall, OtherKind, ResidualLayout, Unsupported
from .flux import FLUX1, KEPT, conditioning, conditioning_specs, rotary_of, to_tokens
from .image_tokens import BATCH, IMAGE, PROMPT, TokenSizes
from .rotary import RotaryAttention, rotary_inputs, write_out_norms
from .shapes import TensorSpec

MODE = "mode"
"""The input of a union ControlNet that says which of its types each token of the prompt stands for, mostly none."""


@dataclass(frozen=True)
class FluxControlNetArchitecture(TokenSizes):
    """A ControlNet that takes tokens of picture, hint and prompt, and gives one residual per block of its own.

    A union ControlNet with a type has one token more than the prompt, and that comes first: it is the type's embedding.
    """

    name: str

    role = Role.CONTROLNET
    arguments = ("x", "timesteps", "context", "y", "guidance", "hint")

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ControlNetFlux and module.latent_input

    def inputs(self, module: ControlNetFlux, dtype: str) -> list[TensorSpec]:
        mode = TensorSpec(MODE, dtype, (PROMPT, module.num_union_modes), steady=True, sample="unit")
        return [
            TensorSpec("image", dtype, (BATCH, IMAGE, module.in_channels)),
            TensorSpec("hint", dtype, (BATCH, IMAGE, module.pos_embed_input.in_features)),
            TensorSpec("context", dtype, (BATCH, PROMPT, module.txt_in.in_features)),
            TensorSpec("timesteps", dtype, (BATCH,), sample="sigma"),
            *rotary_inputs(module.hidden_size // module.num_heads),
            *([mode] if module.num_union_modes else []),
            *conditioning_specs(module, dtype),
        ]

    def outputs(self, module: ControlNetFlux, dtype: str) -> list[TensorSpec]:
        return [TensorSpec(name, dtype, (BATCH, IMAGE, module.hidden_size)) for name in _residuals(module)]

    def function(self, module: ControlNetFlux) -> torch.nn.Module:
        return _ControlNetFunction(module)

    def binding(self, module: ControlNetFlux) -> Binding:
        return partial(_bind, module, _layout(module), lru_cache(KEPT)(partial(_places, module)))


def _residuals(module: ControlNetFlux) -> list[str]:
    return [name for names in _own(module).values() for name in names]


def _own(module: ControlNetFlux) -> dict[str, list[str]]:
    """ComfyUI's lists -> a residual for each block of the ControlNet; no list for blocks that it has not."""
    blocks = {"input": module.controlnet_blocks, "output": module.controlnet_single_blocks}
    return {kind: [f"{kind}_{i}" for i in range(len(found))] for kind, found in blocks.items() if len(found)}


def _layout(module: ControlNetFlux) -> ResidualLayout:
    """Each block's residual stands for several blocks of the model, one after another."""
    blocks = {"input": module.main_model_double, "output": module.main_model_single}
    places = {
        kind: [name for name in names for _ in range(-(-blocks[kind] // len(names)))][: blocks[kind]]
        for kind, names in _own(module).items()
    }
    return ResidualLayout(places, from_end=False)


_TAKEN = frozenset({*FluxControlNetArchitecture.arguments, "control_type"})


def _bind(module: ControlNetFlux, layout: ResidualLayout, places: Any, call: Mapping[str, Any]) -> EngineCall:
    x, context, patch = call["x"], call["context"], module.patch_size
    for name in call.keys() - _TAKEN:
        if call[name] is not None:
            raise Unsupported(name)
    if context is None or context.ndim != 3:
        raise OtherKind("the prompt is another model's")
    types = tuple(call.get("control_type") or ()) if module.num_union_modes else ()
    if len(types) > 1 or any(not 0 <= number < module.num_union_modes for number in types):
        raise Unsupported("a control type that this union ControlNet has not")
    if types:
        context = torch.cat((torch.zeros_like(context[:, :1]), context), 1)
    hint = to_tokens(call["hint"], patch)
    if hint.shape[0] == 1:
        hint = hint.expand(x.shape[0], -1, -1)
    inputs = {"image": to_tokens(x, patch), "hint": hint, "context": context, "timesteps": call["timesteps"]}
    inputs |= conditioning(module, call) | places(tuple(x.shape[-2:]), context.shape[1], types, x.dtype, x.device)
    return EngineCall(inputs, lambda outputs: layout.give(outputs, x))


def _places(
    module: ControlNetFlux,
    size: tuple[int, int],
    prompt: int,
    types: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The rotary embeddings of a call, and the type's place: ComfyUI's own forward lays the tokens out.

    Args:
        prompt: its tokens, and one for each type.
        dtype: native computes places in that of the latent.
    """
    found: dict[str, torch.Tensor] = {}

    def blocks(_img: object, img_ids: torch.Tensor, _hint: object, _txt: object, txt_ids: torch.Tensor, *_: object,
               **__: object) -> None:  # fmt: skip
        found.update(rotary_of(module, txt_ids, img_ids))

    x = torch.zeros(1, 1, *size, dtype=dtype, device=device)
    outside = SimpleNamespace(latent_input=True, forward_orig=blocks)
    ControlNetFlux.forward(outside, x, None, x.new_zeros(1, prompt, 1), hint=x)
    if module.num_union_modes:
        found[MODE] = x.new_zeros(prompt, module.num_union_modes)
        for place, number in enumerate(types):
            found[MODE][place, number] = 1
    return found


class _ControlNetFunction(torch.nn.Module):
    """ComfyUI's own forward on tokens, without places: attention turns queries and keys."""

    def __init__(self, controlnet: ControlNetFlux):
        super().__init__()
        write_out_norms(controlnet)
        controlnet.pe_embedder = _NoPlaces()
        for layer in controlnet.modules():
            if isinstance(layer, DoubleStreamBlock | SingleStreamBlock):
                layer.register_forward_pre_hook(self._with_options, with_kwargs=True)
        if controlnet.num_union_modes:
            controlnet.txt_in.register_forward_hook(self._with_type)
        self.controlnet = controlnet
        self._attention: RotaryAttention | None = None
        self._mode: torch.Tensor | None = None

    def forward(
        self,
        image: torch.Tensor,
        hint: torch.Tensor,
        context: torch.Tensor,
        timesteps: torch.Tensor,
        pe_prompt: torch.Tensor,
        pe_image: torch.Tensor,
        *rest: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        net = self.controlnet
        self._attention = RotaryAttention(torch.cat((pe_prompt, pe_image)))
        if net.num_union_modes:
            self._mode, *rest = rest
        y, *guidance = rest
        ids = image[:, :1, :1]  # joined, and not looked at
        found = net.forward_orig(image, ids, hint, context, ids, timesteps, y, *guidance, control_type=())
        own, step = _own(net), {kind: -(-len(given) // len(_own(net)[kind])) for kind, given in found.items()}
        return tuple(found[kind][step[kind] * i] for kind, names in own.items() for i in range(len(names)))

    def _with_options(self, _block: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "transformer_options": self._attention.options}

    def _with_type(self, _layer: torch.nn.Module, _args: tuple, prompt: torch.Tensor) -> torch.Tensor:
        embedding = self.controlnet.controlnet_mode_embedder.weight.to(prompt.dtype)
        return prompt * (1 - self._mode.sum(-1, keepdim=True)) + self._mode @ embedding


class _NoPlaces(torch.nn.Module):
    """Stands where rotary embeddings were made."""

    def forward(self, _ids: torch.Tensor) -> None:
        return None


FILE_MARKS = ()
"""Their files have the blocks of Flux's, whose marks tell them."""

NEEDS = (
    "comfy.ldm.common_dit:pad_to_patch_size(img, patch_size, ...)",
    "comfy.ldm.flux.controlnet:ControlNetFlux.forward(self, x, timesteps, context, y, guidance, hint, **)",
    "comfy.ldm.flux.controlnet:ControlNetFlux.forward_orig(self, img, img_ids, controlnet_cond, txt, txt_ids, "
    "timesteps, y, guidance, control_type)",
    "comfy.ldm.flux.layers:DoubleStreamBlock",
    "comfy.ldm.flux.layers:SingleStreamBlock",
)
"""Names in ComfyUI's own code that the family relies on, see ``needs``."""

ARCHITECTURES = (FluxControlNetArchitecture(FLUX1, 8, 2, 256, "flux1_controlnet"),)
