"""ComfyUI's ControlNets for Flux.1 as engines.

ControlNets of InstantX and Union take the control image as a latent. ControlNets of XLabs and Mistoline take its
pixels, which a hint encoder makes a latent: it is a per-image pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, OtherKind, PerImagePass, ResidualLayout, Unsupported, refuse_all_but
from ..shapes import Dim, TensorSpec
from ..sizes import BATCH, IMAGE, LATENT, PATCH, PROMPT, ImageTokenSizes
from ..token_layers import MOST_KEPT, RotaryAttention, latent_to_tokens, rotary_inputs, write_out_norms
from .flux import FLUX1, conditioning, conditioning_specs, rotary_of, thousandths

HINT, PIXELS = "hint", "hint_pixels"
"""The hint's tokens, which an engine takes; and the control image of networks with a hint encoder."""
MODE = "mode"
"""The input of a union ControlNet that marks the token of a type: a number per token of the prompt and type."""


@dataclass(frozen=True)
class FluxControlNetArchitecture(ImageTokenSizes):
    """A ControlNet that takes tokens of picture, hint and prompt, and gives a residual per block of its own.

    A union ControlNet with a type has a further token before the prompt: the type's embedding.
    """

    name = "flux1_controlnet"
    role = Role.CONTROLNET
    usual_prompt = 256
    arguments = ("x", "timesteps", "context", "y", "guidance", "hint")

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is ControlNetFlux

    def inputs(self, module: ControlNetFlux, dtype: str) -> list[TensorSpec]:
        specs = self.engine_inputs(module, dtype)
        return specs if module.latent_input else [_pixels(dtype) if spec.name == HINT else spec for spec in specs]

    def engine_inputs(self, module: ControlNetFlux, dtype: str) -> list[TensorSpec]:
        mode = TensorSpec(MODE, dtype, (PROMPT, module.num_union_modes), steady=True, sample="unit")
        return [
            TensorSpec("image", dtype, (BATCH, IMAGE, module.in_channels)),
            TensorSpec(HINT, dtype, (BATCH, IMAGE, module.pos_embed_input.in_features)),
            TensorSpec("context", dtype, (BATCH, PROMPT, module.txt_in.in_features)),
            TensorSpec("timesteps", "float32", (BATCH,), sample="sigma"),
            *rotary_inputs(module.hidden_size // module.num_heads),
            *([mode] if module.num_union_modes else []),
            *conditioning_specs(module, dtype),
        ]

    def outputs(self, module: ControlNetFlux, dtype: str) -> list[TensorSpec]:
        return [TensorSpec(name, dtype, (BATCH, IMAGE, module.hidden_size)) for name in _residuals(module)]

    def function(self, module: ControlNetFlux) -> torch.nn.Module:
        return _ControlNetFunction(module)

    def passes(self, module: ControlNetFlux) -> list[PerImagePass]:
        if module.latent_input:
            return []
        block = "input_cond_block" if module.mistoline else "input_hint_block"
        found = PerImagePass(
            _pixels(str(module.dtype).removeprefix("torch.")), (HINT,), _HintEncoder(getattr(module, block))
        )
        setattr(module, block, torch.nn.Identity())
        return [found]

    def binding(self, module: ControlNetFlux) -> Binding:
        return partial(_bind, module, _layout(module), lru_cache(MOST_KEPT)(partial(_places, module)))


def _pixels(dtype: str) -> TensorSpec:
    """The control image. Native cuts its latent into tokens without padding, so sides are whole tokens."""
    side = PATCH * LATENT
    return TensorSpec(PIXELS, dtype, (Dim("P"), 3, Dim("H", up=side), Dim("W", up=side)), sample="unit")


def _residuals(module: ControlNetFlux) -> list[str]:
    return [name for names in _own(module).values() for name in names]


def _own(module: ControlNetFlux) -> dict[str, list[str]]:
    """Return ComfyUI's lists -> a residual for each block that acts; no list for missing kinds of blocks.

    A last block does not act where the blocks before it cover the model's blocks, as with six blocks for 19.
    """
    found = {}
    for kind, blocks, wanted in (("input", module.controlnet_blocks, module.main_model_double),
                                 ("output", module.controlnet_single_blocks, module.main_model_single)):  # fmt: skip
        acting = len(blocks)
        if acting and module.latent_input:
            each = math.ceil(wanted / len(blocks))  # blocks of the model for each residual
            acting = math.ceil(wanted / each)
        if acting:
            found[kind] = [f"{kind}_{i}" for i in range(acting)]
    return found


def _layout(module: ControlNetFlux) -> ResidualLayout:
    """Return the layout: each residual serves several blocks of the model, neighbours or, for pixels, every nth."""
    places = {}
    for kind, names in _own(module).items():
        blocks = module.main_model_double if kind == "input" else module.main_model_single
        repeats = -(-blocks // len(names))
        order = [name for name in names for _ in range(repeats)] if module.latent_input else names * repeats
        places[kind] = order[:blocks]
    return ResidualLayout(places, from_end=False)


_TAKEN = frozenset({*FluxControlNetArchitecture.arguments, "control_type"})


def _bind(module: ControlNetFlux, layout: ResidualLayout, places: Any, call: Mapping[str, Any]) -> EngineCall:
    x, context, patch = call["x"], call["context"], module.patch_size
    refuse_all_but(call, _TAKEN)
    if context is None or context.ndim != 3:
        raise OtherKind("the prompt is another model's")
    types = tuple(call.get("control_type") or ()) if module.num_union_modes else ()
    if len(types) > 1 or any(not 0 <= number < module.num_union_modes for number in types):
        raise Unsupported("a control type that this union ControlNet does not have")
    if types:
        context = torch.cat((torch.zeros_like(context[:, :1]), context), 1)
    inputs = {"image": latent_to_tokens(x, patch), "context": context, "timesteps": thousandths(call["timesteps"])}
    inputs |= conditioning(module, call) | places(tuple(x.shape[-2:]), context.shape[1], types, x.dtype, x.device)
    extras: dict[str, int] = {}
    if module.latent_input:
        hint = latent_to_tokens(call["hint"], patch)
        inputs[HINT] = hint.expand(x.shape[0], -1, -1) if hint.shape[0] == 1 else hint
    else:  # the very tensor: the next step finds its encoding by identity
        inputs[PIXELS], extras[PIXELS] = call["hint"], x.shape[0]
    return EngineCall(inputs, lambda outputs: layout.give(outputs, x), extras)


def _places(
    module: ControlNetFlux, size: tuple[int, int], prompt: int, types: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return the rotary embeddings of a call, and the type's place: ComfyUI's own forward lays the tokens out.

    Args:
        prompt: the number of its tokens, with a token for each type.
        dtype: of the latent; native computes places in it.
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
        self.blocks = in_blocks(
            layer for layer in controlnet.modules() if isinstance(layer, DoubleStreamBlock | SingleStreamBlock))
        for layer in self.blocks:
            layer.register_forward_pre_hook(self._with_options, with_kwargs=True)
        if controlnet.num_union_modes:
            controlnet.txt_in.register_forward_hook(self._with_type)
        for embedder in (controlnet.time_in, controlnet.guidance_in):
            embedder.register_forward_pre_hook(lambda _layer, args: (args[0].to(self._dtype),))
        self.controlnet = controlnet
        self._dtype = controlnet.dtype
        self._attention: RotaryAttention | None = None
        self._mode: torch.Tensor | None = None

    def forward(
        self, image: torch.Tensor, hint: torch.Tensor, context: torch.Tensor, timesteps: torch.Tensor,
        pe_prompt: torch.Tensor, pe_image: torch.Tensor, *rest: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        net = self.controlnet
        self._dtype = image.dtype  # native's embeddings of timesteps are in it: it casts the timesteps
        self._attention = RotaryAttention(torch.cat((pe_prompt, pe_image)))
        if net.num_union_modes:
            self._mode, *rest = rest
        y, *guidance = rest
        ids = image[:, :1, :1]  # joined, and not looked at
        found = net.forward_orig(image, ids, hint, context, ids, timesteps, y, *guidance, control_type=())
        own = _own(net)
        step = {kind: -(-len(given) // len(own[kind])) if net.latent_input else 1 for kind, given in found.items()}
        return tuple(found[kind][step[kind] * i] for kind, names in own.items() for i in range(len(names)))

    def _with_options(self, _block: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "transformer_options": self._attention.options}

    def _with_type(self, _layer: torch.nn.Module, _args: tuple, prompt: torch.Tensor) -> torch.Tensor:
        embedding = self.controlnet.controlnet_mode_embedder.weight.to(prompt.dtype)
        return prompt * (1 - self._mode.sum(-1, keepdim=True)) + self._mode @ embedding


class _HintEncoder(torch.nn.Module):
    """A control image's pixels -> the hint's tokens, for each image of the batch."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, pixels: torch.Tensor, batch: int) -> tuple[torch.Tensor]:
        if pixels.shape[0] not in (1, batch):
            raise Unsupported(f"{pixels.shape[0]} control images for a batch of {batch}, which engines do not do")
        return (latent_to_tokens(self.block(pixels * 2.0 - 1.0), PATCH).expand(batch, -1, -1),)


class _NoPlaces(torch.nn.Module):
    """Replaces the layer that makes rotary embeddings."""

    def forward(self, _ids: torch.Tensor) -> None:
        return None


FILE_MARKS = ()
"""The marks of Flux hold for these files too."""

NEEDS = (
    "comfy.ldm.common_dit:pad_to_patch_size(img, patch_size, ...)",
    "comfy.ldm.flux.controlnet:ControlNetFlux.forward(self, x, timesteps, context, y, guidance, hint, **)",
    "comfy.ldm.flux.controlnet:ControlNetFlux.forward_orig(self, img, img_ids, controlnet_cond, txt, txt_ids, "
    "timesteps, y, guidance, control_type)",
    "comfy.ldm.flux.layers:DoubleStreamBlock",
    "comfy.ldm.flux.layers:SingleStreamBlock",
)

ARCHITECTURES = (FluxControlNetArchitecture(FLUX1),)
