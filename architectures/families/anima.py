"""Anima: a transformer on the tokens of a picture, which attends to the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.anima.model import Anima as Native
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.cosmos.position_embedding import VideoRopePosition3DEmb
from comfy.ldm.cosmos.predict2 import Attention, Block

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, Unsupported, prompt_of, refuse_all_but
from ..shapes import Dim, Range, Sizes, Symbol, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, PATCH, PICTURE, PROMPT, TokenSizes
from ..token_layers import MOST_KEPT, attended, normed, to_tokens, to_video, write_out_norms


@dataclass(frozen=True)
class Anima(TokenSizes):
    """The transformer from its tokens on; ComfyUI itself prepares the prompt, once per run."""

    name = "anima"
    role = Role.BACKBONE
    arguments = ("x", "timesteps", "context", "fps", "padding_mask")
    shared = SharedTokens("RC")
    usual_prompt = 512
    one_length = True
    free: ClassVar[Mapping[str, Range]] = {s: served for s, served in TokenSizes.free.items() if s != "L"}
    named: ClassVar[Mapping[str, Symbol]] = {s: symbol for s, symbol in TokenSizes.named.items() if s != "L"}

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is Native
            and (module.patch_spatial, module.patch_temporal) == (PATCH, 1)
            and module.concat_padding_mask
            and module.use_adaln_lora
            and not module.extra_per_block_abs_pos_emb
            and type(module.pos_embedder) is VideoRopePosition3DEmb
            and all(type(block) is Block for block in module.blocks)
        )

    def inputs(self, module: Native, dtype: str) -> list[TensorSpec]:
        block, each = module.blocks[0], PATCH * PATCH
        return [
            TensorSpec("image", dtype, (BATCH, PICTURE, each * module.in_channels)),
            TensorSpec("context", dtype, (BATCH, PROMPT, block.cross_attn.context_dim)),
            TensorSpec("timestep", "float32", (BATCH,), sample="sigma"),
            TensorSpec("pe", "float32", (Dim("R"), Dim("C"), block.self_attn.head_dim // 2, 2), steady=True),
        ]

    def outputs(self, module: Native, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (BATCH, PICTURE, PATCH * PATCH * module.out_channels))]

    def function(self, module: Native) -> torch.nn.Module:
        return OnTokens(module)

    def binding(self, module: Native) -> Binding:
        return partial(_bind, lru_cache(MOST_KEPT)(partial(_places, module.pos_embedder)))


_TAKEN = frozenset({"x", "timesteps", "context", "transformer_options", "denoise_mask", "crossattn_controlnet"})
"""Arguments that a call may carry. Native looks at neither of the last two."""


def _bind(places: Callable[..., torch.Tensor], call: Mapping[str, Any]) -> EngineCall:
    x, context, timestep = call["x"], prompt_of(call), call["timesteps"]
    refuse_all_but(call, _TAKEN)
    if x.ndim != 5 or x.shape[2] != 1:
        raise Unsupported("a latent with several frames, and engines of this model take one")
    if timestep.ndim != 1:
        raise Unsupported("noise of its own for parts of a picture, which engines do not do")
    padded = pad_to_patch_size(x, (1, PATCH, PATCH))
    rows, columns = (side // PATCH for side in padded.shape[3:])
    inputs = {"image": to_tokens(padded), "context": context, "timestep": timestep}
    inputs["pe"] = places(rows, columns, x.device)

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return to_video(outputs["out"], 1, rows, columns)[..., : x.shape[3], : x.shape[4]].to(x.device, x.dtype)

    return EngineCall(inputs, finish)


def _places(embedder: VideoRopePosition3DEmb, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return cosine and sine of each token's angles, as native places it: (rows, columns, angles, 2)."""
    turns = embedder.generate_embeddings(torch.Size((1, 1, rows, columns, 1)), device=device, fps=None)
    return turns[..., 0].unflatten(0, (rows, columns)).contiguous()


def _waves(count: int, times: torch.Tensor) -> torch.Tensor:
    """Return native's cosines and sines of timesteps: (batch, 1, features)."""
    half = count // 2
    rates = torch.exp(-torch.arange(half, device=times.device, dtype=torch.float32) * math.log(10000) / half)
    angles = times[:, None, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


def _turned(norm: torch.nn.RMSNorm, x: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
    """Norm and turn queries or keys (batch, tokens, heads, features); partners lie half of the features apart."""
    wide = normed(x, norm.weight.to(x.dtype).float(), norm.eps)
    cos, sin = pe.unsqueeze(1).unbind(-1)
    partner = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    signed = sin.unsqueeze(-2) * torch.arange(-1, 2, 2, device=x.device).unsqueeze(-1)
    return (wide * cos.repeat(1, 1, 2) + partner * signed.flatten(-2)).to(x.dtype)


def _heads(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (layer.n_heads, -1))


class Step(torch.nn.Module):
    """A block of a network, with a companion's layers for it.

    Attributes:
        block: native's.
        others: the companion's layers, by the name of the block's layer whose input each changes.
    """

    def __init__(self, block: Block, others: Mapping[str, torch.nn.Module] | None = None):
        super().__init__()
        self.block, self.others = block, torch.nn.ModuleDict({_key(name): o for name, o in (others or {}).items()})

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, lora: torch.Tensor, words: torch.Tensor, pe: torch.Tensor,
        *given: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Compute native's block; a companion's layer gets the input of the block's layer, and ``given``."""
        def change(layer: str, y: torch.Tensor) -> torch.Tensor:
            return self.others[_key(layer)](y, *given) if _key(layer) in self.others else y

        return _block(self.block, x, time, lora, words, pe, change)


def _key(layer: str) -> str:
    return layer.replace(".", "_")


Change = Callable[[str, torch.Tensor], torch.Tensor]
"""The name of a layer of a block, and its input -> the changed input."""


def _self_attention(layer: Attention, x: torch.Tensor, pe: torch.Tensor, change: Change) -> torch.Tensor:
    projections = {"q_proj": layer.q_proj, "k_proj": layer.k_proj, "v_proj": layer.v_proj}
    q, k, v = (_heads(layer, project(change(f"self_attn.{name}", x))) for name, project in projections.items())
    return layer.output_proj(attended(_turned(layer.q_norm, q, pe), _turned(layer.k_norm, k, pe), v))


def _cross_attention(layer: Attention, x: torch.Tensor, words: torch.Tensor, change: Change) -> torch.Tensor:
    q = layer.q_norm(_heads(layer, layer.q_proj(change("cross_attn.q_proj", x))))
    k = layer.k_norm(_heads(layer, layer.k_proj(words)))
    return layer.output_proj(attended(q, k, _heads(layer, layer.v_proj(words))))


def _block(
    block: Block, x: torch.Tensor, time: torch.Tensor, lora: torch.Tensor, words: torch.Tensor, pe: torch.Tensor,
    change: Change,
) -> torch.Tensor:  # fmt: skip
    """Compute native's block; ``x`` may be of a wider dtype than the layers."""
    parts = (
        (block.adaln_modulation_self_attn, block.layer_norm_self_attn, lambda y: _self_attention(
            block.self_attn, y, pe, change)),
        (block.adaln_modulation_cross_attn, block.layer_norm_cross_attn, lambda y: _cross_attention(
            block.cross_attn, y, words, change)),
        (block.adaln_modulation_mlp, block.layer_norm_mlp, lambda y: block.mlp(change("mlp.layer1", y))),
    )  # fmt: skip
    for modulation, norm, layer in parts:
        shift, scale, gate = (modulation(time) + lora).chunk(3, -1)
        found = layer((norm(x) * (1 + scale) + shift).to(time.dtype))
        x = torch.addcmul(x, gate.to(x.dtype), found.to(x.dtype))
    return x


class OnTokens(torch.nn.Module):
    """All that native does in each step."""

    def __init__(self, net: Native, companion: torch.nn.Module | None = None):
        super().__init__()
        write_out_norms(net)
        del net.llm_adapter  # ComfyUI runs it before, on the prompt
        self.net, self.companion = net, companion
        self.blocks = in_blocks(Step(block, self.companion_layers(number)) for number, block in enumerate(net.blocks))

    def companion_layers(self, number: int) -> Mapping[str, torch.nn.Module]:
        """Return the companion's layers for a block, see ``Step``: none."""
        return {}

    def forward(
        self, image: torch.Tensor, context: torch.Tensor, timestep: torch.Tensor, pe: torch.Tensor,
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        net, dtype = self.net, image.dtype
        x = net.x_embedder.proj[1](F.pad(image, (0, PATCH * PATCH)))  # zeros: native marks padding with ones
        time, lora = net.t_embedder[1](_waves(net.model_channels, timestep).to(dtype))
        time, pe = net.t_embedding_norm(time), pe.flatten(0, 1)
        if dtype == torch.float16:
            x = x.float()
        for block in self.blocks:
            x = block(x, time, lora, context, pe, *given)
        last = net.final_layer
        shift, scale = (last.adaln_modulation(time) + lora[..., : 2 * last.hidden_size]).chunk(2, -1)
        return (last.linear(last.layer_norm(x.to(dtype)) * (1 + scale) + shift),)


SIZES = Sizes("Anima", 512, 1024, 1536, max_tokens=512)

FILE_MARKS = ("llm_adapter.blocks.",)

NEEDS = (
    "comfy.ldm.anima.model:Anima",
    "comfy.ldm.common_dit:pad_to_patch_size(img, patch_size, ...)",
    "comfy.ldm.cosmos.position_embedding:VideoRopePosition3DEmb.generate_embeddings(self, B_T_H_W_C, fps, ...)",
    "comfy.ldm.cosmos.predict2:Attention",
    "comfy.ldm.cosmos.predict2:Block",
    "comfy.ldm.cosmos.predict2:MiniTrainDIT._forward(self, x, timesteps, context, fps, padding_mask, **)",
)

ARCHITECTURES = (Anima(SIZES),)
