"""Z-Image, Turbo and base: one stream of tokens, first the prompt's and then the picture's.

The layers for the prompt alone depend on neither picture nor timestep, and are a per-image pass. Both parts of the
stream are multiples of 32 tokens long, so an engine's sizes are numbers of such groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.lumina.model import JointTransformerBlock, NextDiT, pos_ids_x

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, PerImagePass, not_done, prompt_of, refuse_all_but
from ..shapes import TOKEN_STEP, Dim, Range, Sizes, Symbol, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import PATCH, ImageTokenSizes
from ..token_layers import (
    MOST_KEPT,
    attended,
    latent_to_tokens,
    normed,
    rope_changes,
    rope_options,
    rotated,
    to_latent,
)

GROUP = 32
"""Native pads prompt and picture to a multiple of so many tokens."""

_TAKEN = frozenset({
    "x", "timesteps", "context", "transformer_options", "num_tokens", "attention_mask", "control", "ref_latents",
    "ref_contexts", "siglip_feats", "clip_text_pooled",
})  # fmt: skip
"""Arguments that a call may carry. Without references native uses the first four alone."""


@dataclass(frozen=True)
class ZImageSizes(ImageTokenSizes):
    """Images, groups of picture tokens and groups of prompt tokens."""

    sizes: Sizes = Sizes("Z-Image", 512, 1024, 1536, max_tokens=7 * TOKEN_STEP)

    usual_prompt = 4
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 64), "N": Range(1, 33, 1 << 13), "T": Range(1, 3, 1 << 9)}
    named: ClassVar[Mapping[str, Symbol]] = {
        name: replace(symbol, step=GROUP) if name in "NT" else symbol for name, symbol in ImageTokenSizes.named.items()}
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "N": 3, "T": 1}
    compared: ClassVar[Sequence[Mapping[str, int]]] = ({"B": 1, "N": 2, "T": 2}, traced)


@dataclass(frozen=True)
class ZImage(ZImageSizes):
    """A network that takes a picture's tokens, marks of their padding, the encoded prompt and rotary embeddings."""

    name = "zimage"
    role = Role.BACKBONE
    arguments = ("x", "timesteps", "context", "num_tokens", "attention_mask")
    shared = SharedTokens("N", front=(Dim("T", up=GROUP),), alone=True)

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is NextDiT
            and module.pad_tokens_multiple == GROUP
            and module.patch_size == PATCH
            and module.clip_text_pooled_proj is None
            and all(map(is_plain, (*module.layers, *module.noise_refiner, *module.context_refiner)))
        )

    def inputs(self, module: NextDiT, dtype: str) -> list[TensorSpec]:
        return [_prompt(module, dtype) if spec.name == "prompt" else spec for spec in self.engine_inputs(module, dtype)]

    def engine_inputs(self, module: NextDiT, dtype: str) -> list[TensorSpec]:
        batch, picture, prompt = Dim("B"), Dim("N", up=GROUP), Dim("T", up=GROUP)
        turns = (module.dim // module.n_heads // 2, 2)
        return [
            TensorSpec("picture", dtype, (batch, picture, PATCH**2 * module.in_channels)),
            TensorSpec("padding", "float32", (picture, 1), sample="unit", steady=True),
            TensorSpec("prompt", dtype, (batch, prompt, module.dim)),
            TensorSpec("timesteps", "float32", (batch,), sample="sigma"),
            TensorSpec("prompt_places", "float32", (prompt, *turns), steady=True),
            TensorSpec("picture_places", "float32", (picture, *turns), steady=True),
        ]

    def outputs(self, module: NextDiT, dtype: str) -> list[TensorSpec]:
        shape = (Dim("B"), Dim("N", up=GROUP), PATCH**2 * module.out_channels)
        return [TensorSpec("out", dtype, shape)]

    def function(self, module: NextDiT) -> torch.nn.Module:
        return _OnTokens(module)

    def passes(self, module: NextDiT) -> list[PerImagePass]:
        """See ``Architecture``: the layers for the prompt alone."""
        takes = _prompt(module, str(module.dtype).removeprefix("torch."))
        found = PerImagePass(takes, ("prompt",), _PromptEncoder(module))
        module.cap_embedder = module.context_refiner = torch.nn.Identity()
        return [found]

    def binding(self, module: NextDiT) -> Binding:
        return partial(_bind, lru_cache(MOST_KEPT)(partial(_places, module.rope_embedder)))


def is_plain(layer: torch.nn.Module, kind: type = JointTransformerBlock) -> bool:
    """Tell whether a layer is of exactly this class, and ``block`` computes it."""
    attention = layer.attention if type(layer) is kind else None
    return attention is not None and attention.qk_norm and attention.n_local_heads == attention.n_local_kv_heads


def _prompt(module: NextDiT, dtype: str) -> TensorSpec:
    return TensorSpec("context", dtype, (Dim("B"), Dim("L"), module.cap_embedder[1].in_features))


def _bind(places: Callable[..., tuple[torch.Tensor, ...]], call: Mapping[str, Any]) -> EngineCall:
    if call.get("ref_latents"):
        raise not_done("ref_latents")
    refuse_all_but(call, _TAKEN)
    x, context = call["x"], prompt_of(call)
    rows, columns = (math.ceil(side / PATCH) for side in x.shape[2:])
    groups, tokens = math.ceil(context.shape[1] / GROUP), latent_to_tokens(x, channels_last=True)
    padding, prompt, picture = places(rows, columns, groups, rope_changes(call), x.device)
    inputs = {
        "picture": F.pad(tokens, (0, 0, 0, len(padding) - rows * columns)),
        "padding": padding,
        "context": context if len(context) == len(x) else context.expand(len(x), -1, -1),
        "timesteps": call["timesteps"],
        "prompt_places": prompt,
        "picture_places": picture,
    }

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return to_latent(outputs["out"], x, channels_last=True).to(x.device, x.dtype)

    return EngineCall(inputs, finish)


def _places(
    embedder: torch.nn.Module, rows: int, columns: int, groups: int, changes: tuple, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return marks of a picture's padding, (tokens, 1), then rotary embeddings of the prompt and of the picture.

    Args:
        groups: of the prompt's tokens.
        changes: see ``rope_changes``.
    """
    with torch.inference_mode(False):
        ids = pos_ids_x(groups * GROUP + 1, rows, columns, 1, device, transformer_options=rope_options(changes))
        ids = F.pad(ids, (0, 0, 0, -ids.shape[1] % GROUP))
        padding = (torch.arange(ids.shape[1], device=device) >= rows * columns).float()[:, None]
        return padding, _prompt_places(embedder, groups * GROUP, device), _turns(embedder, ids)


def _prompt_places(embedder: torch.nn.Module, tokens: int, device: torch.device) -> torch.Tensor:
    ids = torch.zeros(1, tokens, 3, dtype=torch.float32, device=device)
    ids[:, :, 0] = torch.arange(tokens, dtype=torch.float32, device=device) + 1.0
    return _turns(embedder, ids)


def _turns(embedder: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return cosine and sine of each place's angles, (tokens, angles, 2), of native's rotations."""
    return embedder(ids)[0, 0, :, :, :, 0].contiguous()


def _normed(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a layer's RMSNorm in float32, which is the result's dtype."""
    eps = torch.finfo(torch.float32).eps if layer.eps is None else layer.eps
    return normed(x, layer.weight.to(x.dtype).float(), eps)


def _turned(layer: torch.nn.Module, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Norm and turn queries or keys; all are (images, tokens, heads, features)."""
    return rotated(_normed(layer, x), places.unsqueeze(1)).to(x.dtype)


def _attended(layer: torch.nn.Module, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    q, k, v = layer.qkv(x).unflatten(-1, (3, layer.n_local_heads, layer.head_dim)).unbind(2)
    heads = [_turned(layer.q_norm, q, places), _turned(layer.k_norm, k, places), v]
    return layer.out(attended(*heads))


def _bounded(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x


def _fed_forward(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer.w2(_bounded(F.silu(layer.w1(x)) * layer.w3(x)))


def block(layer: torch.nn.Module, x: torch.Tensor, places: torch.Tensor, time: torch.Tensor | None) -> torch.Tensor:
    """Compute a block; without a time it has no modulation."""
    dtype, scales, gates = x.dtype, (0.0, 0.0), (1.0, 1.0)
    if time is not None:
        parts = layer.adaLN_modulation(time).unsqueeze(1).chunk(4, dim=2)
        scales, gates = parts[0::2], [gate.tanh() for gate in parts[1::2]]
    h = _bounded(_attended(layer.attention, (_normed(layer.attention_norm1, x) * (1 + scales[0])).to(dtype), places))
    x = x + (gates[0] * _normed(layer.attention_norm2, h)).to(dtype)
    h = _fed_forward(layer.feed_forward, (_normed(layer.ffn_norm1, x) * (1 + scales[1])).to(dtype))
    h = h if time is None else _bounded(h)
    return x + (gates[1] * _normed(layer.ffn_norm2, h)).to(dtype)


class _PromptEncoder(torch.nn.Module):
    """Native's way of a prompt to the tokens that it puts before the picture's."""

    def __init__(self, net: NextDiT):
        super().__init__()
        self._parameters = net._parameters  # shared, for the padding: live weights are written there
        self.embedder = net.cap_embedder
        self.blocks = net.context_refiner
        self.rotary = net.rope_embedder

    def forward(self, prompt: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.embedder[1](_normed(self.embedder[0], prompt).to(prompt.dtype))
        padding = self._parameters["cap_pad_token"].to(x.dtype).expand(x.shape[0], -x.shape[1] % GROUP, -1)
        x = torch.cat([x, padding], 1)
        places = _prompt_places(self.rotary, x.shape[1], x.device)
        for layer in self.blocks:
            x = block(layer, x, places, None)
        return (x,)


def started(
    net: NextDiT, picture: torch.Tensor, padding: torch.Tensor, timesteps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the first block: the picture's tokens, and the time."""
    time = net.t_embedder((1.0 - timesteps) * net.time_scale, dtype=picture.dtype)
    embedded = net.x_embedder(picture)
    return torch.where(padding > 0.5, net.x_pad_token.to(embedded.dtype), embedded), time


def finished(net: NextDiT, x: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor]:
    """Compute the network's output from the picture's tokens behind the last block."""
    last = net.final_layer
    x = last.norm_final(x) * (1 + last.adaLN_modulation(time).unsqueeze(1))
    return (-last.linear(x),)


class _OnTokens(torch.nn.Module):
    """All that native does in each step."""

    def __init__(self, net: NextDiT):
        super().__init__()
        self.net = net
        self.blocks = in_blocks((*net.noise_refiner, *net.layers), block)

    def forward(
        self, picture: torch.Tensor, padding: torch.Tensor, prompt: torch.Tensor, timesteps: torch.Tensor,
        prompt_places: torch.Tensor, picture_places: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        net = self.net
        x, time = started(net, picture, padding, timesteps)
        for layer in net.noise_refiner:
            x = layer(x, picture_places, time)
        x, places = torch.cat([prompt, x], 1), torch.cat([prompt_places, picture_places])
        for layer in net.layers:
            x = layer(x, places, time)
        return finished(net, x[:, prompt.shape[1] :], time)


FILE_MARKS = ("cap_embedder.1.",)
"""A part of tensors' names in files of this family, in ComfyUI's layout and in that of Diffusers."""

NEEDS = (
    "comfy.ldm.common_dit:pad_to_patch_size(img, patch_size, ...)",
    "comfy.ldm.lumina.model:JointTransformerBlock",
    "comfy.ldm.lumina.model:NextDiT._forward(self, x, timesteps, context, num_tokens, attention_mask, ref_latents, "
    "ref_contexts, siglip_feats, transformer_options, **)",
    "comfy.ldm.lumina.model:pos_ids_x(_, _, _, _, _, transformer_options)",
)

ARCHITECTURES = (ZImage(),)
