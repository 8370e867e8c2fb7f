"""Wan 2.1 and 2.2 (text to video, image to video, VACE): a transformer on tokens of a video."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import comfy.ldm.wan.model
import torch
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.wan.model import (
    VaceWanAttentionBlock,
    VaceWanModel,
    WanAttentionBlock,
    WanI2VCrossAttention,
    WanModel,
    WanSelfAttention,
    WanT2VCrossAttention,
)

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, Unsupported, prompt_of, refuse_all_but
from ..quantised_linear import linear_behind
from ..shapes import Dim, Sizes, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import BATCH, FRAMES, PATCH, PROMPT, VIDEO, VideoSizes
from ..token_layers import (
    MOST_KEPT,
    attended,
    numbers,
    rope_changes,
    rope_options,
    to_tokens,
    to_video,
    write_out_norms,
)

PATCHES = (1, PATCH, PATCH)
CONTROLS, IMAGE = Dim("V"), Dim("I")


@dataclass(frozen=True, kw_only=True)
class Wan(VideoSizes):
    """The transformer from its tokens on. Each frame has a timestep of its own, as Wan 2.2 5B needs it.

    Networks that take a picture by CLIP have ``clip``. VACE has ``strengths``, and ``controls``: the tokens of a
    control video for the whole batch, then of the next video.

    Attributes:
        kind: class of the native network.
        small: its latent is that of Wan 2.2's own VAE, see ``_SMALL_LATENT``.
    """

    name: str
    kind: type[WanModel]
    small: bool

    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "clip_fea", "time_dim_concat", "transformer_options")
    shared = SharedTokens("RC")

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is self.kind
            and tuple(module.patch_size) == PATCHES
            and (module.out_dim == _SMALL_LATENT) is self.small
            and all(map(_is_plain, (*module.blocks, *getattr(module, "vace_blocks", ()))))
        )

    def inputs(self, module: WanModel, dtype: str) -> list[TensorSpec]:
        each, pairs = PATCH * PATCH, module.rope_embedder.dim // 2
        found = [
            TensorSpec("video", dtype, (BATCH, VIDEO, each * module.in_dim)),
            TensorSpec("context", dtype, (BATCH, PROMPT, module.text_dim)),
            TensorSpec("timestep", "float32", (BATCH, FRAMES), sample="timestep"),
            TensorSpec("pe", "float32", (FRAMES, Dim("R"), Dim("C"), pairs, 2), steady=True),
        ]
        if module.img_emb is not None:
            found.append(TensorSpec("clip", dtype, (BATCH, IMAGE, module.img_emb.proj[1].in_features)))
        if self.kind is VaceWanModel:
            found.append(TensorSpec("strengths", "float32", (CONTROLS,), sample="unit", steady=True))
            found.append(TensorSpec("controls", dtype, (CONTROLS * BATCH, VIDEO, each * module.vace_in_dim)))
        return found

    def outputs(self, module: WanModel, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("out", dtype, (BATCH, VIDEO, PATCH * PATCH * module.out_dim))]

    def function(self, module: WanModel) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: WanModel) -> Binding:
        return partial(_bind, module, lru_cache(MOST_KEPT)(partial(_places, module)), lru_cache(MOST_KEPT)(numbers))


_SMALL_LATENT = 48
"""Channels of the latent of Wan 2.2's own VAE, whose elements are 16 pixels along each side."""


def _is_plain(block: torch.nn.Module) -> bool:
    cross = (WanT2VCrossAttention, WanI2VCrossAttention)
    blocks = (WanAttentionBlock, VaceWanAttentionBlock)
    fed = (torch.nn.Sequential, _FOLDING)
    attends = type(block.self_attn) is WanSelfAttention and type(block.cross_attn) in cross
    return type(block) in blocks and attends and type(block.ffn) in fed


_FOLDING = getattr(comfy.ldm.wan.model, "WanFeedForward", None)
"""Newer versions of ComfyUI have this class of two linear layers, with an activation folded into the second."""


_TAKEN = frozenset({*Wan.arguments, "denoise_mask", "crossattn_controlnet"})
"""Arguments that a call may carry. Native looks at neither of the last two."""
_OF_VACE = frozenset({"vace_context", "vace_strength"})


def _bind(
    module: WanModel, places: Callable[..., torch.Tensor], strengths: Callable[..., torch.Tensor],
    call: Mapping[str, Any],
) -> EngineCall:  # fmt: skip
    x, context = call["x"], prompt_of(call)
    vace = isinstance(module, VaceWanModel)
    taken = _TAKEN | (_OF_VACE if vace else set()) | ({"reference_latent"} if module.ref_conv is None else set())
    refuse_all_but(call, taken)
    padded = pad_to_patch_size(x, PATCHES)
    if (behind := call.get("time_dim_concat")) is not None:
        padded = torch.cat([padded, pad_to_patch_size(behind, PATCHES)], 2)
    frames = padded.shape[2]
    inputs = {
        "video": to_tokens(padded),
        "context": context,
        "timestep": _timesteps(call["timestep"], frames, vace),
        "pe": places(frames, *x.shape[3:], rope_changes(call), x.device, x.dtype),
    }
    if module.img_emb is not None:
        inputs["clip"] = _clip(module, call.get("clip_fea"))
    if vace:
        inputs |= _controls(call, strengths)

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows, columns = (side // PATCH for side in padded.shape[3:])
        video = to_video(outputs["out"], frames, rows, columns)
        return video[:, :, : x.shape[2], : x.shape[3], : x.shape[4]].to(x.device, x.dtype)

    return EngineCall(inputs, finish)


def _timesteps(timestep: torch.Tensor, frames: int, vace: bool) -> torch.Tensor:
    """Return the timestep of each frame, (batch, frames)."""
    if timestep.ndim == 1:
        return timestep.unsqueeze(1).expand(-1, frames)
    if vace or timestep.shape[1] not in (1, frames):
        raise Unsupported("noise of its own for parts of a frame, which engines do not do")
    return timestep.expand(-1, frames)


def _clip(module: WanModel, features: torch.Tensor | None) -> torch.Tensor:
    if features is None:
        raise Unsupported("no picture by CLIP Vision, which this model needs")
    places = module.img_emb.emb_pos
    if places is not None and features.shape[1] > places.shape[1]:
        raise Unsupported("more pictures by CLIP Vision than this model takes")
    return features


def _controls(call: Mapping[str, Any], strengths: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of VACE. A call has (batch, videos, channels, frames, height, width)."""
    videos, given = call["vace_context"], call["vace_strength"]
    if any(side % PATCH for side in videos.shape[-2:]):
        raise Unsupported("a control video whose latent has odd sides, which engines do not do")
    if len(given) < videos.shape[1]:
        raise Unsupported("a control video without a strength, which engines do not do")
    return {
        "strengths": strengths(tuple(map(float, given[: videos.shape[1]])), videos.device),
        "controls": to_tokens(videos.movedim(1, 0).flatten(0, 1)),
    }


def _places(
    module: WanModel, frames: int, height: int, width: int, changes: tuple, device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return cosine and sine of each token's angles, as native places it: (frames, rows, columns, angles, 2).

    Args:
        changes: see ``rope_changes``.
    """
    turns = WanModel.rope_encode(
        module, frames, height, width, device=device, dtype=dtype, transformer_options=rope_options(changes)
    )  # (1, tokens, 1, angles, 2, 2)
    return turns[0, :, 0, :, :, 0].unflatten(0, (frames, -(-height // PATCH), -(-width // PATCH))).contiguous()


def _waves(count: int, times: torch.Tensor) -> torch.Tensor:
    """Return native's cosines and sines of timesteps, in a further dimension."""
    half = count // 2
    rates = torch.pow(10000, -torch.arange(half, device=times.device, dtype=torch.float32).div(half))
    angles = times.unsqueeze(-1) * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


def _embedded(layer: torch.nn.Conv3d, tokens: torch.Tensor) -> torch.Tensor:
    """Compute native's convolution of whole patches, which is in float32 for each dtype of the network."""
    wide = torch.nn.functional.linear(tokens.float(), layer.weight.flatten(1).float(), layer.bias.float())
    return wide.to(tokens.dtype)


def _in_frames(tokens: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
    """Split tokens into frames: (batch, frames, tokens of a frame, features); ``pe`` has the sizes."""
    return tokens.unflatten(1, (pe.shape[0], pe.shape[1] * pe.shape[2]))


def _moved(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scale and shift tokens of frames, (batch, frames, tokens of a frame, features); return (batch, tokens, ...)."""
    return torch.addcmul(shift.unsqueeze(2), x, 1 + scale.unsqueeze(2)).flatten(1, 2)


def _plus(x: torch.Tensor, more: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Add tokens, (batch, tokens, features), to tokens of frames, times each frame's gate."""
    return torch.addcmul(x, more.reshape_as(x), gate.unsqueeze(2))


def _heads(layer: WanSelfAttention, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (layer.num_heads, -1))


def _cross(layer: WanSelfAttention, x: torch.Tensor, words: torch.Tensor, clip: torch.Tensor | None) -> torch.Tensor:
    """Compute attention to the prompt, and to a picture by CLIP, if any."""
    q = _heads(layer, layer.norm_q(layer.q(x)))
    found = attended(q, _heads(layer, layer.norm_k(layer.k(words))), _heads(layer, layer.v(words)))
    if clip is not None:
        k, v = layer.norm_k_img(layer.k_img(clip)), layer.v_img(clip)
        found = found + attended(q, _heads(layer, k), _heads(layer, v))
    return layer.o(found)


def _block(
    block: WanAttentionBlock, x: torch.Tensor, time: torch.Tensor, pe: torch.Tensor, words: torch.Tensor,
    clip: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Compute native's block.

    Args:
        x: (batch, frames, tokens of a frame, features): so no size is divided by another.
        time: (batch, frames, 6, features).
        pe: (tokens, angles, 2).
    """
    moved = (block.modulation.to(x.dtype).unsqueeze(0) + time).unbind(2)
    own, y = block.self_attn, _moved(block.norm1(x), moved[0], moved[1])
    q, k = (_heads(own, t) for t in (own.norm_q(own.q(y)), own.norm_k(own.k(y))))
    x = _plus(x, own.o(attended(q, k, _heads(own, own.v(y)), pe)), moved[2])
    x = x + _cross(block.cross_attn, block.norm3(x).flatten(1, 2), words, clip).reshape_as(x)
    y, ffn = _moved(block.norm2(x), moved[3], moved[4]), block.ffn
    fed = linear_behind(ffn[2], ffn[0](y), "gelu_tanh") if type(ffn) is _FOLDING else ffn(y)
    return _plus(x, fed, moved[5])


class _Controls:
    """The control videos of a call, whose blocks run beside the video's."""

    def __init__(
        self, net: VaceWanModel, x: torch.Tensor, pe: torch.Tensor, strengths: torch.Tensor, videos: torch.Tensor
    ):
        self._net, self._start, self._strengths = net, x, strengths
        self._c = _in_frames(_embedded(net.vace_patch_embedding, videos), pe)

    def add(self, number: int, x: torch.Tensor, time: torch.Tensor, pe: torch.Tensor, words: torch.Tensor):
        """Return the video's tokens behind a block, with the results of the control block there, if any."""
        own = self._net.vace_layers_mapping.get(number)
        if own is None:
            return x
        block, count = self._net.vace_blocks[own], self._strengths.shape[0]
        if block.block_id == 0:
            self._c = block.before_proj(self._c) + self._start.repeat(count, 1, 1, 1)
        self._c = block(self._c, time.repeat(count, 1, 1, 1), pe, words.repeat(count, 1, 1), None)
        added = block.after_proj(self._c).unflatten(0, (count, -1)).float() * self._strengths.reshape(-1, 1, 1, 1, 1)
        return x + added.to(x.dtype).sum(0)


class _OnTokens(torch.nn.Module):
    def __init__(self, net: WanModel):
        super().__init__()
        write_out_norms(net)
        self.net = net
        self.blocks = in_blocks((*net.blocks, *getattr(net, "vace_blocks", ())), _block)

    def forward(
        self, video: torch.Tensor, context: torch.Tensor, timestep: torch.Tensor, pe: torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        net, dtype = self.net, video.dtype
        x = _in_frames(_embedded(net.patch_embedding, video), pe)
        places = pe.flatten(0, 2)
        time = net.time_embedding(_waves(net.freq_dim, timestep).to(dtype))
        moves = net.time_projection(time).unflatten(-1, (6, -1))
        words = net.text_embedding(context)
        clip = net.img_emb(more[0]) if net.img_emb is not None else None
        controls = _Controls(net, x, pe, *more) if isinstance(net, VaceWanModel) else None
        for number, block in enumerate(net.blocks):
            x = block(x, moves, places, words, clip)
            if controls is not None:
                x = controls.add(number, x, moves, places, words)
        last = net.head
        shift, scale = (last.modulation.to(dtype).unsqueeze(0) + time.unsqueeze(2)).unbind(2)
        return (last.head(_moved(last.norm(x), shift, scale)),)


SIZES = Sizes("Wan", 256, 640, 1280, max_tokens=512)

FILE_MARKS = ("head.modulation",)

NEEDS = (
    "comfy.ldm.common_dit:pad_to_patch_size(img, patch_size, ...)",
    "comfy.ldm.wan.model:VaceWanAttentionBlock",
    "comfy.ldm.wan.model:VaceWanModel",
    "comfy.ldm.wan.model:WanAttentionBlock",
    "comfy.ldm.wan.model:WanI2VCrossAttention",
    "comfy.ldm.wan.model:WanModel._forward"
    "(self, x, timestep, context, clip_fea, time_dim_concat, transformer_options, **)",
    "comfy.ldm.wan.model:WanModel.rope_encode"
    "(self, t, h, w, t_start, steps_t, steps_h, steps_w, device, dtype, transformer_options, ...)",
    "comfy.ldm.wan.model:WanSelfAttention",
    "comfy.ldm.wan.model:WanT2VCrossAttention",
)

ARCHITECTURES = (
    Wan(SIZES, name="wan", kind=WanModel, small=False, pixels=16, usual_frames=21),
    Wan(SIZES, name="wan22_5b", kind=WanModel, small=True, pixels=32, usual_frames=31),
    Wan(SIZES, name="wan_vace", kind=VaceWanModel, small=False, pixels=16, usual_frames=21),
)
