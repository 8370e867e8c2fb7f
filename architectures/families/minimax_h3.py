"""MiniMax H3: one stream of tokens of the prompt, of conditions, of sound and of video, which are sampled together."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import comfy.ldm.minimax.model as native
import torch
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.minimax.model import DiTBlock, MiniMaxH3Model

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall, Unsupported, prompt_of, refuse_all_but
from ..quantised_linear import linear_behind
from ..shapes import Dim, Picture, Range, RequestedSizes, Sizes, Symbol, TensorSpec
from ..shared_tokens import SharedTokens
from ..sizes import FRAMES, PATCH, PROMPT, VIDEO, VideoSizes
from ..token_layers import attended, write_out_norms

PATCHES = (1, PATCH, PATCH)
CONDITION, SOUND = Dim("K"), Dim("A", up=2)
CLOCKS = ("video", "sound", "shown", "heard")
"""Streams with a time of their own: video and prompt, sound, and conditions of both kinds."""
OF_VIDEO, OF_TEXT, OF_SOUND = range(3)
"""Kinds of tokens. A block moves each kind by rows of its own, one for each clock."""
KINDS = 3
FPS, SOUNDS = 24, 40
"""Frames and steps of sound per second."""


@dataclass(frozen=True, kw_only=True)
class MiniMaxH3(VideoSizes):
    """The transformer from its tokens on. Conditions are frames to begin or end with, and references.

    Native refines the prompt before sampling, and makes the layout of all tokens.
    """

    name = "minimax_h3"
    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "transformer_options", "minimax_payload")
    shared = SharedTokens("RC", front=(PROMPT, CONDITION, SOUND))
    halved: ClassVar[Sequence[str]] = ("F",)
    free: ClassVar[Mapping[str, Range]] = {
        **{symbol: VideoSizes.free[symbol] for symbol in "FRC"}, "T": Range(1, 97, 1 << 15), "A": Range(1, 11, 1 << 14),
        "K": Range(0, 131, 1 << 18)}
    named: ClassVar[Mapping[str, Symbol]] = {
        **{symbol: VideoSizes.named[symbol] for symbol in "FRCT"}, "A": Symbol("steps of sound"),
        "K": Symbol("reference tokens", of_picture=False)}
    traced: ClassVar[Mapping[str, int]] = {"F": 3, "R": 3, "C": 4, "T": 7, "A": 5, "K": 6}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (
        {"F": 2, "R": 4, "C": 3, "T": 9, "A": 3, "K": 0}, {"F": 4, "R": 3, "C": 5, "T": 30, "A": 8, "K": 11})

    def matches(self, module: torch.nn.Module) -> bool:
        plain = type(module) is MiniMaxH3Model and tuple(module.patch_size) == PATCHES
        return plain and all(type(block) is DiTBlock and not hasattr(block.attn, "to_gate_compress")
                             for block in module.blocks)  # fmt: skip

    def inputs(self, module: MiniMaxH3Model, dtype: str) -> list[TensorSpec]:
        video, angles = module.video_patch_proj.in_features, 3 * module.rope.inv_freq.shape[0]
        return [
            TensorSpec("text", dtype, (1, PROMPT, module.hidden_size)),
            TensorSpec("kinds", "float32", (PROMPT,), sample="unit", steady=True),
            TensorSpec("condition", "float32", (CONDITION, video), steady=True),
            TensorSpec("is_sound", "float32", (CONDITION,), sample="unit", steady=True),
            TensorSpec("sound", "float32", (SOUND, module.audio_latents_dim)),
            TensorSpec("video", "float32", (VIDEO, video)),
            TensorSpec("times", "float32", (len(CLOCKS),), sample="sigma"),
            TensorSpec("pe_text", dtype, (PROMPT, angles, 2), steady=True),
            TensorSpec("pe_condition", dtype, (CONDITION, angles, 2), steady=True),
            TensorSpec("pe_sound", dtype, (SOUND, angles, 2), steady=True),
            TensorSpec("pe_video", dtype, (FRAMES, Dim("R"), Dim("C"), angles, 2), steady=True),
        ]

    def outputs(self, module: MiniMaxH3Model, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("video_out", "float32", (VIDEO, module.video_patch_proj.in_features)),
                TensorSpec("sound_out", "float32", (SOUND, module.audio_latents_dim))]  # fmt: skip

    def function(self, module: MiniMaxH3Model) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: MiniMaxH3Model) -> Binding:
        return partial(_bind, module, weakref.WeakKeyDictionary())

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        """See ``NetworkSizes``: three conditions of the largest frame at most."""
        own = super()._ranges(asked)
        sound = Range(1, _steps(4 * self.usual_frames), _steps(4 * self.most_frames))
        return {**own, "A": sound, "K": Range(0, 0, 3 * own["R"].max ** 2)}

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        """See ``NetworkSizes``: 17 frames are five of a latent, and the last five are two."""
        frames = max(5, picture.length + (5 - picture.length) % 17)
        return {**super()._of_picture(picture), "F": (frames - 5) // 17 * 5 + 2, "A": _steps(frames)}

    def _length(self, latent: int) -> int:
        return (latent - 2) // 5 * 17 + 5 if latent > 1 else 1


def _steps(frames: int) -> int:
    """Steps of sound that last as long as so many frames."""
    return round(frames / FPS * SOUNDS)


_IGNORED = frozenset({*MiniMaxH3.arguments, "attention_mask", "crossattn_controlnet"})
"""Arguments that a call may carry. Native looks at neither of the last two."""

Kept = weakref.WeakKeyDictionary[Any, tuple[tuple, dict[str, torch.Tensor]]]
"""Native's layout of a run -> what its tensors were made of, and the tensors."""


def _bind(module: MiniMaxH3Model, kept: Kept, call: Mapping[str, Any]) -> EngineCall:
    x, context, payload = call["x"], prompt_of(call), call.get("minimax_payload") or {}
    refuse_all_but(call, _IGNORED)
    if torch.is_tensor(x) or len(x) != 2 or x[0].shape[0] != 1:
        raise Unsupported("a latent other than one video with its sound, which engines do not do")
    if context.shape[-1] != module.hidden_size:
        raise Unsupported("a prompt that ComfyUI did not refine before sampling, which engines do not do")
    video, sound = pad_to_patch_size(x[0], PATCHES), x[1]
    layout, size = payload.get("layout"), (context.shape[1], *video.shape[2:], sound.shape[-1])
    if layout is None or layout.signature != size:
        raise Unsupported("a video or prompt of another size than ComfyUI prepared, which engines do not do")
    shifts, sigma = _shifts(module, call), (call["timestep"].flatten()[0] / 1000.0).float().clamp(min=1e-6)
    inputs = {
        "text": context,
        "sound": native.pack_audio(sound.float()),
        "video": native.patchify_video(video.float(), PATCHES),
        "times": _times(payload, sigma, shifts),
        **_steady(module, kept, layout, payload, video.device, context.dtype),
    }
    frames, rows, columns = size[1], size[2] // PATCH, size[3] // PATCH

    def finish(outputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        found = outputs["video_out"].to(video.device)
        seen = native.unpatchify_video(found, frames, rows, columns, module.latents_dim, PATCHES)
        seen = seen[:, :, :, : x[0].shape[3], : x[0].shape[4]]
        heard = native.unpack_audio(outputs["sound_out"].to(sound.device)).to(sound.dtype)
        return [-seen.to(video.dtype), heard * -_slope(sigma, shifts).to(sound.device)]

    return EngineCall(inputs, finish)


def _shifts(module: MiniMaxH3Model, call: Mapping[str, Any]) -> tuple[float, float]:
    """The shifts of the schedules of video and sound; a node may have set them."""
    options = call.get("transformer_options") or {}
    return (float(options.get("minimax_h3_sigma_shift_video", module.sigma_shift_video)),
            float(options.get("minimax_h3_sigma_shift_audio", module.sigma_shift_audio)))  # fmt: skip


def _slope(sigma: torch.Tensor, shifts: tuple[float, float]) -> torch.Tensor:
    """The factor of the sound's velocity; newer versions multiply by it outside of the network."""
    slope = getattr(native, "time_shift_slope", None)
    return torch.ones_like(sigma) if slope is None else slope(sigma, *shifts)


def _times(payload: Mapping[str, Any], sigma: torch.Tensor, shifts: tuple[float, float]) -> torch.Tensor:
    """The time of each of ``CLOCKS``; the host waits for nothing."""
    video, sound = 1.0 - sigma, 1.0 - native.time_shift_sigma(sigma, *shifts)
    shown = video.clamp(min=float(payload.get("visual_cond_noise_aug", native.VISUAL_COND_TIMESTEP)))
    heard = sound.clamp(min=float(payload.get("audio_cond_noise_aug", native.AUDIO_COND_TIMESTEP)))
    return torch.stack([video, sound, shown, heard])


def _steady(
    module: MiniMaxH3Model, kept: Kept, layout: Any, payload: Mapping[str, Any], device: torch.device,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The inputs that stay the same for a whole run: places of all tokens, kinds of text, conditions."""
    latents = (payload.get(name) or () for name in ("cond_video_latents", "cond_audio_latents"))
    noise = (payload.get(name) for name in ("visual_cond_noise_aug", "audio_cond_noise_aug", "seed"))
    made_of = (device, dtype, *(tuple(map(id, several)) for several in latents), *noise,
               id(payload.get("text_token_tags")))  # fmt: skip
    if layout not in kept or kept[layout][0] != made_of:
        kept[layout] = made_of, _of_layout(module, layout, payload, device, dtype)
    return kept[layout][1]


def _of_layout(
    module: MiniMaxH3Model, layout: Any, payload: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    words, frames, height, width, steps = layout.signature
    angles = module.rope_freqs(layout.position_ids, device).chunk(2, 1)[0]
    pe = torch.stack([angles.cos(), angles.sin()], -1).to(dtype)
    size = (frames, height // PATCH, width // PATCH)
    behind = 2 * steps + size[0] * size[1] * size[2]
    conditions = layout.seq_len - words - behind
    tags = payload.get("text_token_tags")
    kinds = torch.full((words,), OF_TEXT) if tags is None else tags.view(-1)
    rows, is_sound = _conditions(module, layout, payload, device)
    pe_text, pe_condition, pe_sound, pe_video = pe.split([words, conditions, 2 * steps, behind - 2 * steps])
    return {"kinds": kinds.to(device, torch.float32) / OF_SOUND, "condition": rows, "is_sound": is_sound,
            "pe_text": pe_text, "pe_condition": pe_condition, "pe_sound": pe_sound,
            "pe_video": pe_video.unflatten(0, size)}  # fmt: skip


def _conditions(
    module: MiniMaxH3Model, layout: Any, payload: Mapping[str, Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all conditions in their order, rows of sound filled up with zeros, and 1 for each of sound."""
    width = module.video_patch_proj.in_features
    left = {True: module._cond_audio_rows(payload, device), False: module._cond_video_rows(payload, device)}
    found, flags = [torch.zeros(0, width, device=device)], [torch.zeros(0, device=device)]
    for start, stop, kind in layout.segments[1:-2]:
        of_sound = kind.endswith("audio")
        rows, left[of_sound] = left[of_sound].tensor_split([stop - start])
        found.append(torch.nn.functional.pad(rows, (0, width - rows.shape[1])))
        flags.append(torch.full((stop - start,), float(of_sound), device=device))
    return torch.cat(found), torch.cat(flags)


def _turned(x: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
    """Turn the first features of queries or keys, (tokens, heads, features), by half of them each."""
    cos, sin = (t.unsqueeze(1) for t in pe.unbind(-1))
    count = pe.shape[1]
    first, second, rest = x[..., :count], x[..., count : 2 * count], x[..., 2 * count :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _block(
    block: DiTBlock, x: torch.Tensor, times: torch.Tensor, rows: torch.Tensor, pe: torch.Tensor
) -> torch.Tensor:
    """Native's block.

    Args:
        x: (tokens, features).
        times: (clocks, features), what the blocks are moved by.
        rows: of the block's tables, for each token.
    """
    moved = [table.to(x.dtype) for table in block.adaln_proj(times)]
    own, y = block.attn, block.norm1(x) * (1.0 + moved[1])[rows] + moved[0][rows]
    q, k, v = (t.unflatten(-1, (own.heads, -1)) for t in own.qkv_proj(y).chunk(3, -1))
    q, k = _turned(own.q_norm(q), pe), _turned(own.k_norm(k), pe)
    found = attended(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0)
    x = torch.addcmul(x, own.out_proj(found), moved[2][rows])
    y = block.norm2(x) * (1.0 + moved[4])[rows] + moved[3][rows]
    return torch.addcmul(x, linear_behind(block.mlp.fc2, block.mlp.fc1(y), "swiglu"), moved[5][rows])


class _OnTokens(torch.nn.Module):
    def __init__(self, net: MiniMaxH3Model):
        super().__init__()
        write_out_norms(net)
        net.token_refiner = net.condition_proj = torch.nn.Identity()  # native has refined the prompt
        self.net = net
        self.blocks = in_blocks(net.blocks, _block)

    def forward(
        self, text: torch.Tensor, kinds: torch.Tensor, condition: torch.Tensor, is_sound: torch.Tensor,
        sound: torch.Tensor, video: torch.Tensor, times: torch.Tensor, pe_text: torch.Tensor,
        pe_condition: torch.Tensor, pe_sound: torch.Tensor, pe_video: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        net, dtype = self.net, text.dtype
        heard = net.audio_patch_proj(condition[:, : sound.shape[1]])
        of_sound = is_sound.round()
        conditions = torch.where(of_sound.unsqueeze(1) > 0, heard, net.video_patch_proj(condition))
        x = torch.cat([text[0], *(t.to(dtype) for t in (
            conditions, net.audio_patch_proj(sound), net.video_patch_proj(video)))])
        rows = torch.cat([
            (kinds * OF_SOUND).round(),  # by the video's clock, which is the first
            torch.where(of_sound > 0, 3 * KINDS + OF_SOUND, 2 * KINDS + OF_VIDEO),
            torch.full_like(sound[:, 0], KINDS + OF_SOUND),
            torch.full_like(video[:, 0], OF_VIDEO),
        ]).long()  # fmt: skip
        pe, moves = torch.cat([pe_text, pe_condition, pe_sound, pe_video.flatten(0, 2)]), self._moves(times, dtype)
        for block in net.blocks:
            x = block(x, moves, rows, pe)
        last, behind = net.final_layer, x.shape[0] - video.shape[0]
        shift, scale = last.adaln_proj(moves)
        seen, said = x[behind:], x[behind - sound.shape[0] : behind]
        seen, said = (last.norm(t) * (1.0 + scale[row]) + shift[row] for row, t in enumerate((seen, said)))
        return last.video_out(seen.float()), last.audio_out(said.float())

    def _moves(self, times: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The features of each clock's time that blocks are moved by; pruned networks have them in a table."""
        net = self.net
        if not net.use_adaln_curves:
            return net.time_embedder(times).to(dtype)
        table = net.adaln_t_table
        place = times.clamp(0.0, 1.0) * (table.shape[0] - 1)
        below = place.floor().long().clamp(max=table.shape[0] - 2)
        return torch.lerp(table[below], table[below + 1], (place - below).unsqueeze(1))


SIZES = Sizes("MiniMax H3", 256, 768, 1344, max_tokens=1024)

FILE_MARKS = ("audio_patch_proj.",)

NEEDS = (
    "comfy.ldm.minimax.model:DiTBlock",
    "comfy.ldm.minimax.model:MiniMaxH3Model._forward"
    "(self, x, timestep, context, transformer_options, minimax_payload, ..., **)",
    "comfy.ldm.minimax.model:MiniMaxH3Model._cond_audio_rows(self, payload, device)",
    "comfy.ldm.minimax.model:MiniMaxH3Model._cond_video_rows(self, payload, device)",
    "comfy.ldm.minimax.model:MiniMaxH3Model.rope_freqs(self, position_ids, device)",
    "comfy.ldm.minimax.model:pack_audio(latent)",
    "comfy.ldm.minimax.model:patchify_video(latent, patch_size)",
    "comfy.ldm.minimax.model:time_shift_sigma(sigma, from_shift, to_shift)",
    "comfy.ldm.minimax.model:unpack_audio(rows, ch)",
    "comfy.ldm.minimax.model:unpatchify_video(rows, t, h, w, c, patch_size)",
)
"""Names in ComfyUI's own code that the family relies on, see ``needs``."""

ARCHITECTURES = (MiniMaxH3(SIZES, pixels=32, usual_frames=37, most_frames=107),)
