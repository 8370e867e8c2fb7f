"""The network of LTX-2 from its tokens on, as a function of tensors: two streams, of video and of sound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from comfy.ldm.lightricks.av_model import BasicAVTransformerBlock, LTXAVModel
from comfy.ldm.lightricks.model import CrossAttention, FeedForward, LTXRopeType

from ..blocks import in_blocks
from ..quantised_linear import linear_behind
from ..token_layers import attended, normed, rotated, write_out_norms
from ..user_attention import computed

FOLDS = "linear_input_act" in FeedForward.forward.__code__.co_names
"""True for versions of ComfyUI that fold the activation into the linear layer behind it."""
SEEN_LATER = "rms_adaln" in BasicAVTransformerBlock.forward.__code__.co_names
"""True for versions in which sound attends to the video as it is after that has attended to sound."""


class _Stream(NamedTuple):
    """The tensors that all blocks take of video, or of sound.

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
    """Native's norm, which has no weights."""
    return normed(x, 1.0, 1e-6).to(x.dtype)


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
        return computed(q, k, v, mask, exact=True)
    own = k.shape[2] - count
    masks = weights.unsqueeze(0), guides.unsqueeze(1) * is_video
    parts = zip((q[:, :, :own], q[:, :, own:]), masks, strict=True)
    return torch.cat([computed(part, k, v, mask, exact=True) for part, mask in parts], 1)


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


class OnTokens(torch.nn.Module):
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
        guides: torch.Tensor, marks: torch.Tensor | None = None,
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
        if marks is not None:
            x = x + marks.unsqueeze(-1).to(x.dtype) * net.keyframes_abs_pos_embedding.to(x.dtype)
        for block in net.transformer_blocks:
            x, heard = block(x, heard, seen, said, guides if guides.shape[0] else None)
        out = self._out(net.norm_out, net.scale_shift_table, x, last, rows)
        sound_out = self._out(net.audio_norm_out, net.audio_scale_shift_table, heard, sound_last, sound_rows)
        return net.proj_out(out), net.audio_proj_out(sound_out)

    def _of_clocks(
        self, layer: Callable, times: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers that the clocks of a batch move blocks by, and the last layer."""
        found = layer(times.flatten(), None, batch_size=times.shape[0], hidden_dtype=dtype)
        return tuple(t.unflatten(0, times.shape) for t in found)

    def _out(
        self, norm: torch.nn.Module, table: torch.Tensor, x: torch.Tensor, last: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        shift, scale = ((table[i].to(last.dtype) + last)[:, rows] for i in range(2))
        return norm(x) * (1 + scale) + shift
