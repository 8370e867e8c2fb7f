"""LTX-2.0 and 2.3: two streams, of video and of sound, that attend to prompts of their own and to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from comfy.ldm.lightricks.av_model import BasicAVTransformerBlock, LTXAVModel
from comfy.ldm.lightricks.model import CrossAttention, FeedForward, LTXRopeType

from . import Role
from .blocks import in_blocks
from .calls import Binding, EngineCall, PerImagePass, Unsupported
from .folded_activation import linear_behind
from .rotary import rotated, write_out_norms
from .shapes import MOST, Dim, Picture, Range, RequestedSizes, Sizes, Symbol, TensorSpec
from .sizes import BATCH, PROMPT, ImageTokenSizes
from .token_layers import attended

VIDEO, SOUND, GUIDES = Dim("N"), Dim("A"), Dim("G")
CLOCKS, SOUND_CLOCKS = Dim("K"), Dim("L")
EACH = 8
"""Frames of the video that a latent frame stands for; the first one stands for one."""
SECOND = 25
"""Tokens of sound in a second, and frames of a usual video."""
BASE, WITH_PROMPT = 6, 9
"""Shifts, scales and gates of a block, without and with those of the attention to the prompt."""
FOLDS = "linear_input_act" in FeedForward.forward.__code__.co_names
"""True for versions of ComfyUI that fold the activation into the linear layer behind it."""
SEEN_LATER = "rms_adaln" in BasicAVTransformerBlock.forward.__code__.co_names
"""True for versions in which sound attends to the video as it is after that has attended to sound."""


@dataclass(frozen=True)
class LTX2(ImageTokenSizes):
    """The transformer from its tokens on. Guides are tokens behind the video's, references of sound before its own.

    Each token has one of some clocks: there is one for all, one for each frame or one for each token. The least number
    is two, since code that was compiled for one would serve no other number.
    """

    name = "ltx2"
    role = Role.BACKBONE
    arguments = ("x", "timestep", "context", "attention_mask", "frame_rate", "transformer_options", "keyframe_idxs",
                 "denoise_mask")  # fmt: skip
    pixels = 32
    patch = 1
    usual_prompt = 1024
    free: ClassVar[Mapping[str, Range]] = {
        "B": Range(1, 2, 16), "N": Range(2, 1000, 1 << 18), "T": Range(1, 130, MOST["max_tokens"]),
        "A": Range(1, 59, 1 << 14), "K": Range(2, 31, 1 << 18), "L": Range(2, 17, 1 << 14), "G": Range(0, 37, 1 << 17)}
    named: ClassVar[Mapping[str, Symbol]] = {
        **ImageTokenSizes.named, "A": Symbol("sound tokens"), "K": Symbol("clocks", of_picture=False),
        "L": Symbol("clocks of sound", of_picture=False), "G": Symbol("guide tokens", of_picture=False)}
    traced: ClassVar[Mapping[str, int]] = {"B": 2, "N": 12, "T": 7, "A": 5, "K": 3, "L": 4, "G": 6}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (
        {"B": 1, "N": 16, "T": 8, "A": 3, "K": 2, "L": 2, "G": 0},
        {"B": 2, "N": 35, "T": 13, "A": 9, "K": 35, "L": 9, "G": 10})

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is LTXAVModel
            and getattr(module, "keyframes_abs_pos_embedding", None) is None
            and (module.prompt_adaln_single is not None) is bool(module.cross_attention_adaln)
            and all(type(block) is BasicAVTransformerBlock for block in module.transformer_blocks)
        )

    def inputs(self, module: LTXAVModel, dtype: str) -> list[TensorSpec]:
        heads, sound_heads = module.num_attention_heads, module.audio_num_attention_heads
        half, sound_half = module.inner_dim // heads // 2, module.audio_inner_dim // sound_heads // 2
        cross = module.audio_cross_attention_dim // sound_heads // 2
        words, sound_words = _widths_of_prompt(module)
        return [
            TensorSpec("video", dtype, (BATCH, VIDEO, module.in_channels)),
            TensorSpec("sound", dtype, (BATCH, SOUND, module.audio_in_channels)),
            TensorSpec("context", dtype, (BATCH, PROMPT, words)),
            TensorSpec("sound_context", dtype, (BATCH, PROMPT, sound_words)),
            TensorSpec("times", "float32", (BATCH, CLOCKS), sample="sigma"),
            TensorSpec("sound_times", "float32", (BATCH, SOUND_CLOCKS), sample="sigma"),
            TensorSpec("clocks", "float32", (VIDEO,), sample="unit", steady=True),
            TensorSpec("sound_clocks", "float32", (SOUND,), sample="unit", steady=True),
            TensorSpec("pe", dtype, (VIDEO, heads, half, 2), steady=True),
            TensorSpec("pe_sound", dtype, (SOUND, sound_heads, sound_half, 2), steady=True),
            TensorSpec("pe_cross", dtype, (VIDEO, sound_heads, cross, 2), steady=True),
            TensorSpec("pe_sound_cross", dtype, (SOUND, sound_heads, cross, 2), steady=True),
            TensorSpec("guides", dtype, (GUIDES,)),
        ]

    def outputs(self, module: LTXAVModel, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("video_out", dtype, (BATCH, VIDEO, module.out_channels)),
                TensorSpec("sound_out", dtype, (BATCH, SOUND, module.audio_out_channels))]  # fmt: skip

    def passes(self, module: LTXAVModel) -> list[PerImagePass]:
        """See ``Architecture``: none. Native prepares prompts before sampling, by layers that go out."""
        module.video_embeddings_connector = module.audio_embeddings_connector = torch.nn.Identity()
        if module.caption_proj_before_connector:
            module.caption_projection = module.audio_caption_projection = torch.nn.Identity()
        return []

    def function(self, module: LTXAVModel) -> torch.nn.Module:
        return _OnTokens(module)

    def binding(self, module: LTXAVModel) -> Binding:
        return partial(_bind, module, _without_weights(module), _Places())

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        """See ``NetworkSizes``: videos of 16 seconds, with two frames as guides."""
        own = super()._ranges(asked)
        most = 16 * SECOND // EACH + 1
        tokens = Range(own["N"].min, own["N"].opt * 16, own["N"].max * most)
        return {**own, "N": tokens, "A": Range(1, 5 * SECOND, 16 * SECOND), "K": Range(2, 2, tokens.max),
                "L": Range(2, 2, 16 * SECOND), "G": Range(0, 0, 2 * own["N"].max)}  # fmt: skip

    def _of_picture(self, picture: Picture) -> dict[str, int]:
        frames = (picture.length - 1) // EACH + 1
        return {"N": frames * super()._of_picture(picture)["N"], "A": picture.length}

    def _sides(self, call: Mapping[str, int]) -> Sequence[int]:
        """See ``NetworkSizes``: the tokens of a video tell no sides."""
        return []

    def _picture_words(self, call: Mapping[str, int]) -> list[str]:
        """See ``NetworkSizes``: ``14080 video tokens``."""
        return [f"{call['N']} video tokens"] if "N" in call else []


def _widths_of_prompt(module: LTXAVModel) -> tuple[int, int]:
    """Features of the parts of a prompt's token, for video and for sound."""
    if module.caption_proj_before_connector is False:
        return module.caption_channels, module.caption_channels
    return module.inner_dim, module.audio_inner_dim


def _without_weights(module: LTXAVModel) -> LTXAVModel:
    """A network with the settings of another and no layers: native's own code makes tokens and places by it."""
    found = LTXAVModel.__new__(LTXAVModel)
    torch.nn.Module.__init__(found)
    layers = {"_parameters", "_buffers", "_modules"}
    found.__dict__.update({name: value for name, value in vars(module).items() if name not in layers})
    found.patchify_proj = found.audio_patchify_proj = torch.nn.Identity()
    return found


class _Places:
    """The last rotary embeddings, for steps that want the same again; native makes them in each step."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self._coordinates: list[torch.Tensor] = []
        self._made: dict[str, torch.Tensor] = {}

    def of(
        self, shell: LTXAVModel, coordinates: Sequence[torch.Tensor], rate: float, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return them for coordinates of video and sound, of which all pictures of a batch have the same."""
        found = [t[:1] for t in coordinates]
        wanted = (rate, dtype, *((t.shape, t.device) for t in found))
        if wanted != self._of or not all(map(torch.equal, found, self._coordinates)):
            self._of, self._coordinates = wanted, [t.clone() for t in found]
            made = [turns for stream in shell._prepare_positional_embeddings(found, rate, dtype) for turns, _ in stream]
            names = ("pe", "pe_cross", "pe_sound", "pe_sound_cross")
            self._made = {name: turns[0][..., 0].contiguous() for name, turns in zip(names, made, strict=True)}
        return self._made


_OFF = ("run_vx", "run_ax", "a2v_cross_attn", "v2a_cross_attn")
"""Options that switch a part of the blocks off."""
_IGNORED = frozenset({*LTX2.arguments, "a_timestep", "audio_denoise_mask", "ref_audio", "guide_attention_entries",
                      "crossattn_controlnet"})  # fmt: skip
"""Arguments that a call may carry."""


def _bind(module: LTXAVModel, shell: LTXAVModel, places: _Places, call: Mapping[str, Any]) -> EngineCall:
    x, context, options = call["x"], call.get("context"), call.get("transformer_options") or {}
    if context is None:
        raise Unsupported("there is no prompt")
    for name in (*(call.keys() - _IGNORED), "attention_mask"):
        if call.get(name) is not None:
            raise Unsupported(name)
    for name in _OFF:
        if not options.get(name, True):
            raise Unsupported(f"{name} is off")
    if options.get("stg_self_attn_blocks"):
        raise Unsupported("stg_self_attn_blocks")
    widths = _widths_of_prompt(module)
    if context.shape[-1] != sum(widths):
        raise Unsupported("a prompt that ComfyUI did not prepare before sampling")
    if torch.is_tensor(x) or len(x) != 2 or not x[1].numel():
        raise Unsupported("a video without sound")
    more = {**options, **call}
    for name in ("x", "keyframe_idxs", "denoise_mask"):
        more.pop(name, None)
    (video, sound), coordinates, made = shell._process_input(
        x, call.get("keyframe_idxs"), call.get("denoise_mask"), **more)
    time, sound_time = _timesteps(call)
    rate = call.get("frame_rate", SECOND)
    inputs = {"video": video, "sound": sound, "guides": _guides(shell, video, options, {**more, **made})}
    inputs["context"], inputs["sound_context"] = context.split(widths, -1)
    frame = x[0].shape[3] * x[0].shape[4]
    inputs["times"], inputs["clocks"] = _clocks(time, video.shape[1], frame, made.get("grid_mask"))
    before = made.get("ref_audio_seq_len", 0)
    inputs["sound_times"], inputs["sound_clocks"] = _clocks_of_sound(sound_time, sound.shape[1], before)
    inputs |= places.of(shell, coordinates, rate, video.dtype)
    return EngineCall(inputs, partial(_finished, shell, x, made))


def _finished(
    shell: LTXAVModel, x: Sequence[torch.Tensor], made: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    tokens, heard = (outputs[name].to(x[0].device, x[0].dtype) for name in ("video_out", "sound_out"))
    if (kept := made.get("grid_mask")) is not None:
        every = tokens.new_zeros(made["orig_patchified_shape"])
        every[:, kept] = tokens
        tokens = every
    frames, height, width = x[0].shape[2:]
    video = shell.patchifier.unpatchify(tokens, height, width, frames, x[0].shape[1])
    heard = heard[:, made.get("ref_audio_seq_len", 0) :]
    sound = shell.a_patchifier.unpatchify(heard, shell.num_audio_channels, shell.audio_frequency_bins)
    return [video.clone(), sound.clone()]


def _timesteps(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The timesteps of video and sound; a call has both in one argument, or in two behind native's own forward."""
    time = call["timestep"]
    return tuple(time) if isinstance(time, tuple | list) else (time, call.get("a_timestep", time))


def _clocks(
    time: torch.Tensor, tokens: int, frame: int, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The times of the clocks, (batch, clocks), and the clock of each token, from 0 for the first to 1 for the last.

    Args:
        time: (batch,), or (batch, tokens, 1) where a mask has each token's own.
        frame: tokens of a frame.
        kept: the tokens that native keeps.
    """
    if time.ndim == 1 or time[0].numel() == 1:
        return time.reshape(-1, 1).expand(-1, 2), torch.zeros(tokens, device=time.device)
    every = time.reshape(time.shape[0], -1)
    if every.shape[1] % frame:
        raise Unsupported("a mask of other tokens than the video's")
    frames = every.unflatten(1, (-1, frame))
    if bool((frames.amax(2) == frames.amin(2)).all()):  # the host waits; native does so twice for each frame
        times, rows = frames[:, :, 0], torch.arange(frames.shape[1], device=time.device).repeat_interleave(frame)
        rows = rows if kept is None else rows[kept]
    else:
        times = every if kept is None else every[:, kept]
        rows = torch.arange(tokens, device=time.device)
    return _at_least_two(times, rows)


def _clocks_of_sound(time: torch.Tensor, tokens: int, before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for sound; tokens of a reference stand before the others, at time zero."""
    if time.ndim > 1 and time[0].numel() > 1:
        times = F.pad(time.reshape(time.shape[0], -1), (before, 0))
        return _at_least_two(times, torch.arange(tokens, device=time.device))
    own = time.reshape(-1, 1)
    rows = (torch.arange(tokens, device=time.device) >= before).float()
    return torch.cat([torch.zeros_like(own) if before else own, own], 1), rows


def _at_least_two(times: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if times.shape[1] == 1:
        return times.expand(-1, 2), torch.zeros_like(rows, dtype=torch.float32)
    return times, rows / (times.shape[1] - 1)


def _guides(
    shell: LTXAVModel, video: torch.Tensor, options: Mapping[str, Any], made: Mapping[str, Any]
) -> torch.Tensor:
    """What attention to each weighted guide token is raised by; empty where none is weighted."""
    mask = shell._build_guide_self_attention_mask([video], options, made)
    if mask is None:
        return video.new_zeros(0)
    if mask.guide_start + mask.tracked_count != video.shape[1] or mask.guide_start == 0:
        raise Unsupported("guides elsewhere than behind the video")
    return mask.noisy_mask[0, 0, 0, mask.guide_start :]


class _Stream(NamedTuple):
    """What all blocks take of video, or of sound.

    Attributes:
        context: (batch, words, features) the prompt.
        times: (batch, clocks, shifts, scales and gates), what blocks are moved by.
        rows: the clock of each token.
        pe, pe_cross: rotary embeddings for attention within the stream, and to the other one.
        of_prompt: (batch, 1, shift and scale), what the prompt is moved by, or None.
        crossing: (batch, clocks, shifts and scales) for attention of one stream to the other.
        gate: (batch, 1, features) for what comes from the other stream.
    """

    context: torch.Tensor
    times: torch.Tensor
    rows: torch.Tensor
    pe: torch.Tensor
    pe_cross: torch.Tensor
    of_prompt: torch.Tensor | None
    crossing: torch.Tensor
    gate: torch.Tensor


def _normed(x: torch.Tensor) -> torch.Tensor:
    """Native's norm without weights, written out for the exporter to ONNX."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _turned(x: torch.Tensor, pe: torch.Tensor, split: bool) -> torch.Tensor:
    """Turn queries or keys, (batch, tokens, features): halves of each head, or neighbouring features."""
    heads = x.unflatten(-1, (pe.shape[1], -1)).float()
    if not split:
        return rotated(heads, pe).flatten(2).to(x.dtype)
    first, second = heads.chunk(2, -1)
    cos, sin = pe.unbind(-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(2).to(x.dtype)


def _attention(
    layer: CrossAttention, x: torch.Tensor, to: torch.Tensor | None = None, pe: torch.Tensor | None = None,
    pe_to: torch.Tensor | None = None, split: bool = True, guides: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    seen = x if to is None else to
    q, k, v = layer.q_norm(layer.to_q(x)), layer.k_norm(layer.to_k(seen)), layer.to_v(seen)
    if pe is not None:
        q, k = _turned(q, pe, split), _turned(k, pe if pe_to is None else pe_to, split)
    q, k, v = (t.unflatten(-1, (layer.heads, -1)) for t in (q, k, v))
    found = attended(q, k, v) if guides is None else _guided(q, k, v, guides)
    if layer.to_gate_logits is not None:
        gates = 2.0 * torch.sigmoid(layer.to_gate_logits(x))
        found = (found.unflatten(-1, (layer.heads, -1)) * gates.unsqueeze(-1)).flatten(2)
    return layer.to_out(found)


def _guided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, guides: torch.Tensor) -> torch.Tensor:
    """Attention in which the video and its guides see each other as much as each guide token says."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    count, nothing = guides.shape[0], k[0, 0, :, 0] * 0
    weights, is_video = torch.cat([nothing[count:], guides]), torch.cat([nothing[count:] + 1, guides * 0])
    if torch.onnx.is_in_onnx_export():  # ONNX Runtime takes no attention without queries
        mask = is_video.unsqueeze(1) * weights + weights.unsqueeze(1) * is_video
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    own = k.shape[2] - count
    masks = weights.unsqueeze(0), guides.unsqueeze(1) * is_video
    found = [F.scaled_dot_product_attention(part, k, v, mask)
             for part, mask in zip((q[:, :, :own], q[:, :, own:]), masks, strict=True)]  # fmt: skip
    return torch.cat(found, 2).transpose(1, 2).flatten(2)


class _Moved:
    """Shifts, scales and gates of a stream's tokens in a block, by number."""

    def __init__(self, table: torch.Tensor, times: torch.Tensor, rows: torch.Tensor):
        self._table, self._times, self._rows = table, times.unflatten(-1, (table.shape[0], -1)), rows

    def __getitem__(self, number: int) -> torch.Tensor:
        own = self._table[number].to(self._times.dtype) + self._times[:, :, number]
        return own[:, self._rows]

    def scaled(self, x: torch.Tensor, scale: int, shift: int) -> torch.Tensor:
        """Scale and shift normed tokens."""
        return x * (1 + self[scale]) + self[shift]


def _alone(
    block: BasicAVTransformerBlock, kind: str, x: torch.Tensor, of: _Stream, moved: _Moved, split: bool,
    guides: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A stream's attention to itself and to its prompt; ``kind`` is in the names of its layers."""
    own, prompt = (getattr(block, f"{kind}attn{number}") for number in (1, 2))
    x = torch.addcmul(
        x, _attention(own, moved.scaled(_normed(x), 1, 0), pe=of.pe, split=split, guides=guides), moved[2])
    if of.of_prompt is None:
        return x + _attention(prompt, _normed(x), of.context)
    table = getattr(block, f"{kind}prompt_scale_shift_table")
    shift, scale = (table.to(x.dtype) + of.of_prompt.unflatten(-1, (2, -1))).unbind(2)
    return x + _attention(prompt, moved.scaled(_normed(x), 7, 6), of.context * (1 + scale) + shift) * moved[8]


def _fed(feed: FeedForward, x: torch.Tensor, moved: _Moved) -> torch.Tensor:
    y = moved.scaled(_normed(x), 4, 3)
    fed = linear_behind(feed.net[2], feed.net[0].proj(y), "gelu_tanh") if FOLDS else feed(y)
    return torch.addcmul(x, fed, moved[5])


def _block(
    split: bool, block: BasicAVTransformerBlock, x: torch.Tensor, heard: torch.Tensor, video: _Stream, sound: _Stream,
    guides: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Native's block.

    Args:
        split: whether halves of heads are turned.
        x, heard: (batch, tokens, features) of video and sound.
    """
    moved = _Moved(block.scale_shift_table, video.times, video.rows)
    moved_sound = _Moved(block.audio_scale_shift_table, sound.times, sound.rows)
    x = _alone(block, "", x, video, moved, split, guides)
    heard = _alone(block, "audio_", heard, sound, moved_sound, split)
    seen, said = _normed(x), _normed(heard)
    tables = block.scale_shift_table_a2v_ca_video, block.scale_shift_table_a2v_ca_audio
    cross, cross_sound = (
        _Moved(table[:4], of.crossing, of.rows) for table, of in zip(tables, (video, sound), strict=True))
    gate, gate_sound = (table[4].to(x.dtype) + of.gate for table, of in zip(tables, (video, sound), strict=True))
    x = torch.addcmul(x, _attention(
        block.audio_to_video_attn, cross.scaled(seen, 0, 1), cross_sound.scaled(said, 0, 1), video.pe_cross,
        sound.pe_cross, split), gate)  # fmt: skip
    seen = _normed(x) if SEEN_LATER else seen
    heard = torch.addcmul(heard, _attention(
        block.video_to_audio_attn, cross_sound.scaled(said, 2, 3), cross.scaled(seen, 2, 3), sound.pe_cross,
        video.pe_cross, split), gate_sound)  # fmt: skip
    return _fed(block.ff, x, moved), _fed(block.audio_ff, heard, moved_sound)


class _OnTokens(torch.nn.Module):
    def __init__(self, net: LTXAVModel):
        super().__init__()
        write_out_norms(net)
        self.net = net
        split = net.split_positional_embedding == LTXRopeType.SPLIT
        self.blocks = in_blocks(net.transformer_blocks, partial(_block, split))

    def forward(
        self, video: torch.Tensor, sound: torch.Tensor, context: torch.Tensor, sound_context: torch.Tensor,
        times: torch.Tensor, sound_times: torch.Tensor, clocks: torch.Tensor, sound_clocks: torch.Tensor,
        pe: torch.Tensor, pe_sound: torch.Tensor, pe_cross: torch.Tensor, pe_sound_cross: torch.Tensor,
        guides: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        net, dtype = self.net, video.dtype
        if net.caption_proj_before_connector is False:
            context, sound_context = net.caption_projection(context), net.audio_caption_projection(sound_context)
        times, sound_times = (t * net.timestep_scale_multiplier for t in (times, sound_times))
        rows, sound_rows = ((place * (t.shape[1] - 1)).round().long()
                            for place, t in ((clocks, times), (sound_clocks, sound_times)))  # fmt: skip
        moves, last = self._of_clocks(net.adaln_single, times, dtype)
        sound_moves, sound_last = self._of_clocks(net.audio_adaln_single, sound_times, dtype)
        factor = net.av_ca_timestep_scale_multiplier / net.timestep_scale_multiplier
        seen, said = (
            _Stream(words, own, places, turns, turns_cross,
                    None if of_prompt is None else self._of_clocks(of_prompt, t.amax(1, keepdim=True), dtype)[0],
                    self._of_clocks(crossing, t, dtype)[0],
                    self._of_clocks(gate, other.amax().reshape(1, 1) * factor, dtype)[0])
            for words, own, places, turns, turns_cross, of_prompt, crossing, gate, t, other in (
                (context, moves, rows, pe, pe_cross, net.prompt_adaln_single,
                 net.av_ca_video_scale_shift_adaln_single, net.av_ca_a2v_gate_adaln_single, times, sound_times),
                (sound_context, sound_moves, sound_rows, pe_sound, pe_sound_cross, net.audio_prompt_adaln_single,
                 net.av_ca_audio_scale_shift_adaln_single, net.av_ca_v2a_gate_adaln_single, sound_times, times))
        )
        x, heard = net.patchify_proj(video), net.audio_patchify_proj(sound)
        for block in net.transformer_blocks:
            x, heard = block(x, heard, seen, said, guides if guides.shape[0] else None)
        out = self._out(net.norm_out, net.scale_shift_table, x, last, rows)
        sound_out = self._out(net.audio_norm_out, net.audio_scale_shift_table, heard, sound_last, sound_rows)
        return net.proj_out(out), net.audio_proj_out(sound_out)

    def _of_clocks(
        self, layer: Callable, times: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the clocks of a batch move blocks by, and the last layer."""
        found = layer(times.flatten(), None, batch_size=times.shape[0], hidden_dtype=dtype)
        return tuple(t.unflatten(0, times.shape) for t in found)

    def _out(
        self, norm: torch.nn.Module, table: torch.Tensor, x: torch.Tensor, last: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        shift, scale = ((table[i].to(last.dtype) + last)[:, rows] for i in range(2))
        return norm(x) * (1 + scale) + shift


SIZES = Sizes("LTX-2", 256, 704, 1280, max_tokens=1024)

FILE_MARKS = ("audio_adaln_single.",)

NEEDS = (
    "comfy.ldm.lightricks.av_model:BasicAVTransformerBlock",
    "comfy.ldm.lightricks.av_model:LTXAVModel._prepare_positional_embeddings(self, pixel_coords, frame_rate, x_dtype)",
    "comfy.ldm.lightricks.av_model:LTXAVModel._process_input(self, x, keyframe_idxs, denoise_mask, **)",
    "comfy.ldm.lightricks.av_model:LTXAVModel.forward"
    "(self, x, timestep, context, attention_mask, frame_rate, transformer_options, keyframe_idxs, **)",
    "comfy.ldm.lightricks.model:CrossAttention",
    "comfy.ldm.lightricks.model:FeedForward",
    "comfy.ldm.lightricks.model:LTXRopeType",
    "comfy.ldm.lightricks.model:LTXVModel._build_guide_self_attention_mask"
    "(self, x, transformer_options, merged_args)",
)
"""Names in ComfyUI's own code that the family relies on, see ``needs``."""

ARCHITECTURES = (LTX2(SIZES),)
