"""The decoder of MiniMax H3's VAE: a transformer on tiles of 256 px and clips of 17 frames.

ComfyUI's own code cuts a latent into clips and tiles, and joins what comes out. Several tiles are computed at once. The
transformer's blocks are compiled, for any number of tokens. Pictures are encoded natively.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE, TransformerBlock, ViT3DDecoder

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall
from ..shapes import Range, TensorSpec
from ..sizes import LATENT
from ..token_layers import normed
from ..user_attention import computed
from ..vae_sizes import SIZES, VideoVAESizes, bind_images

FIRST, CLIP = (2, 5), (5, 17)
"""Latent frames and frames: of the shortest video, and of each more of its clips."""

TILES = 4
"""The most tiles of a clip that are computed at once: with one, a fast GPU waits for the next launch."""

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class MiniMaxDecoder(VideoVAESizes):
    """Latents of a still or video -> pixels from -1 to 1, in float32."""

    pixels = 2 * LATENT
    only_live = "tiles of its own"
    tiles_itself = True
    free: ClassVar[Mapping[str, Range]] = {  # nine tiles, of which three are computed at once
        "B": Range(1, 1, 1), "L": Range(0, 6, 1 << 12), "H": Range(1, 32, 1 << 10), "W": Range(1, 32, 1 << 10)}
    traced: ClassVar[Mapping[str, int]] = {"B": 1, "L": 1, "H": 17, "W": 3}

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) is MiniMaxH3VideoVAE
            and type(module.decoder) is ViT3DDecoder
            and all(type(block) is TransformerBlock for block in module.decoder.transformer_blocks)
        )

    def channels(self, module: MiniMaxH3VideoVAE) -> int:
        return module.decoder.x_embedder.in_features

    def outputs(self, module: MiniMaxH3VideoVAE, dtype: str) -> list[TensorSpec]:
        """See ``Architecture``; there are fewer frames, because clips overlap."""
        return super().outputs(module, "float32")

    def function(self, module: MiniMaxH3VideoVAE) -> torch.nn.Module:
        return _Decoder(module)

    def binding(self, module: MiniMaxH3VideoVAE) -> Binding:
        return _bind

    def _later(self, frames: int) -> int:
        clips = (frames - FIRST[1]) // CLIP[1]
        return 0 if frames == 1 else max(0, clips) * CLIP[0] + FIRST[0] - 1

    def _length(self, later: int) -> int:
        return (later + 1 - FIRST[0]) // CLIP[0] * CLIP[1] + FIRST[1] if later else 1


def _bind(call: Mapping[str, Any]) -> EngineCall:
    bound, device = bind_images(call), call["images"].device
    return replace(bound, finish=lambda outputs: outputs["result"].to(device))


class _Decoder(torch.nn.Module):
    def __init__(self, vae: MiniMaxH3VideoVAE):
        super().__init__()
        vae.encoder = vae.quant_conv = torch.nn.Identity()
        self.vae = vae
        self.blocks = in_blocks(vae.decoder.transformer_blocks, _block)
        self._decode, self._join = vae._decode_pixels, vae.tiled_decode
        vae.tiled_decode = self._tiled

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.vae.decode(images),)

    def _tiled(self, z: torch.Tensor) -> torch.Tensor:
        """Decode a clip as native does, but for tiles that are computed beside each other."""
        vae, unit = self.vae, self.vae.vae_ratio
        rows, columns = (
            [slice(start // unit, (start + size) // unit) for start, size in zip(*starts_and_sizes, strict=True)]
            for starts_and_sizes in (vae.split_tiles(side * unit)[:2] for side in z.shape[3:])
        )
        pixels = self._pixels([z[..., row, column] for row in rows for column in columns])
        vae._decode_pixels = lambda some: torch.cat([next(pixels) for _ in some])  # newer versions ask for several
        try:
            return self._join(z)
        finally:
            del vae._decode_pixels

    def _pixels(self, tiles: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the pixels of tiles. A single one is computed twice: so one kind of block serves all."""
        together = torch.cat(tiles if len(tiles) > 1 else 2 * tiles)
        for some in together.tensor_split(math.ceil(len(together) / TILES)):
            yield from self._decode(some).split(1)


def _block(block: TransformerBlock, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Compute native's block.

    Args:
        turns: rotations of some features of each token, (batch, tokens, 1, features / 2, 2, 2).
    """
    attn, ff = block.attn, block.ff
    qkv = attn.to_qkv(normed(x, block.norm1.weight.float(), block.norm1.eps).to(x.dtype))
    q, k, v = qkv.unflatten(-1, (attn.heads, -1)).chunk(3, -1)
    q, k = (_turned(normed(t, 1.0, norm.eps).to(t.dtype), turns) for t, norm in ((q, attn.norm_q), (k, attn.norm_k)))
    found = torch.nan_to_num(computed(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), 0.0)
    x = torch.addcmul(x, attn.to_out(found), block.scale1)
    gate, h = ff.w1(normed(x, block.norm2.weight.float(), block.norm2.eps).to(x.dtype)).chunk(2, -1)
    return torch.addcmul(x, ff.w2(F.silu(gate) * h), block.scale2)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features that lie half of the turned ones apart; the others stay."""
    half = turns.shape[-3]
    one, other, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    one, other, turns = one.float(), other.float(), turns.float()
    first = one * turns[..., 0, 0] + other * turns[..., 0, 1]
    second = one * turns[..., 1, 0] + other * turns[..., 1, 1]
    return torch.cat([first.to(x.dtype), second.to(x.dtype), rest], -1)


NEEDS = (
    "comfy.ldm.minimax.vae:MiniMaxH3VideoVAE._decode_pixels(self, z)",
    "comfy.ldm.minimax.vae:MiniMaxH3VideoVAE.decode(self, z, **)",
    "comfy.ldm.minimax.vae:MiniMaxH3VideoVAE.split_tiles(self, input_len)",
    "comfy.ldm.minimax.vae:MiniMaxH3VideoVAE.tiled_decode(self, z)",
    "comfy.ldm.minimax.vae:TransformerBlock.forward(self, x, rotary_pos_emb)",
    "comfy.ldm.minimax.vae:ViT3DDecoder.forward(self, x)",
)

ARCHITECTURES = (MiniMaxDecoder(SIZES, "minimax_h3_vae_decoder", Role.VAE_DECODER),)
