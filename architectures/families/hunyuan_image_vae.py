"""The VAE of HunyuanImage 2.1: pictures, 32 px an element, in blocks that are compiled for every size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.hunyuan_video.vae import Decoder, Encoder, PixelShuffle2D, PixelUnshuffle2D
from comfy.ldm.models.autoencoder import AutoencodingEngine, DiagonalGaussianRegularizer
from comfy.ldm.modules.diffusionmodules.model import AttnBlock, ResnetBlock

from .. import Role
from ..blocks import in_blocks
from ..shapes import Range
from ..sizes import LATENT
from ..vae_sizes import SIZES, VAESizes
from .autoencoder import attention

PIXELS = 4 * LATENT

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class HunyuanImageVAE(VAESizes):
    """Decoder or encoder of a picture."""

    pixels = PIXELS
    only_live = "sides that are folded into channels"
    free: ClassVar[Mapping[str, Range]] = {"B": Range(1, 1, 1), "H": Range(1, 22, 1 << 10), "W": Range(1, 26, 1 << 10)}
    traced: ClassVar[Mapping[str, int]] = {"B": 1, "H": 3, "W": 4}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (traced,)

    def matches(self, module: torch.nn.Module) -> bool:
        if type(module) is not AutoencodingEngine or type(module.regularization) is not DiagonalGaussianRegularizer:
            return False
        half, kind = self._half(module), Decoder if self.decodes else Encoder
        steps = [layer for layer in half.modules() if type(layer) in (PixelShuffle2D, PixelUnshuffle2D)]
        return type(half) is kind and 2 ** len(steps) == PIXELS and not module.regularization.sample

    def _half(self, module: AutoencodingEngine) -> torch.nn.Module:
        return module.decoder if self.decodes else module.encoder

    def channels(self, module: AutoencodingEngine) -> int:
        return self._half(module).z_channels

    def function(self, module: AutoencodingEngine) -> torch.nn.Module:
        if self.decodes:
            half, module.encoder = module.decoder, torch.nn.Identity()
            return _Half(module, half, half.up)
        half, module.decoder = module.encoder, torch.nn.Identity()
        return _Half(module, half, half.down)


class _Half(torch.nn.Module):
    """Decoder or encoder of a VAE, a row of blocks."""

    def __init__(self, vae: torch.nn.Module, half: torch.nn.Module, stages: torch.nn.Module):
        super().__init__()
        self.vae = vae
        self.last = torch.nn.ModuleList([half.norm_out, half.conv_out])
        decodes = isinstance(half, Decoder)
        mid, layers = ([layer for layer in part.modules() if type(layer) in _COMPUTED] for part in (half.mid, stages))
        ends = {half.conv_in: _entered if decodes else None, self.last: _ended if decodes else _means}
        half.mid.attn_1.optimized_attention = attention
        steps = [half.conv_in, *((*mid, *layers) if decodes else (*layers, *mid)), self.last]
        self.blocks = tuple(block for step in steps
                            for block in in_blocks([step], ends.get(step) or _COMPUTED.get(type(step))))  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return (x,)


def _entered(conv: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    found = F.conv2d(x, conv.weight, conv.bias, padding=conv.padding)
    return found + x.repeat_interleave(found.shape[1] // x.shape[1], 1)


def _enlarged(layer: PixelUnshuffle2D, x: torch.Tensor) -> torch.Tensor:
    """Unfold channels into sides."""
    h = layer.conv(x)
    h = (h + x.repeat_interleave(layer.scale, 1)).unflatten(1, (2, 2, -1))
    return h.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)


def _reduced(layer: PixelShuffle2D, x: torch.Tensor) -> torch.Tensor:
    """Fold sides into channels."""
    h, x = (F.pixel_unshuffle(t, 2).unflatten(1, (-1, 4)).transpose(1, 2).flatten(1, 2) for t in (layer.conv(x), x))
    return h + x.unflatten(1, (-1, layer.ratio)).mean(2)


def _ended(layers: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    norm, conv = layers
    return conv(F.silu(norm(x)))


def _means(layers: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Return the means of the latent; deviations are not used."""
    found = _ended(layers, x)
    return (found + x.unflatten(1, (found.shape[1], -1)).mean(2)).chunk(2, 1)[0]


_COMPUTED = {ResnetBlock: None, AttnBlock: None, PixelUnshuffle2D: _enlarged, PixelShuffle2D: _reduced}
"""Layer -> what computes it instead of its own forward, if anything."""
_PLACE = "comfy.ldm.hunyuan_video.vae"
NEEDS = (
    f"{_PLACE}:Decoder.forward(self, z)",
    f"{_PLACE}:Encoder.forward(self, x)",
    f"{_PLACE}:PixelShuffle2D.forward(self, x)",
    f"{_PLACE}:PixelUnshuffle2D.forward(self, x)",
    "comfy.ldm.models.autoencoder:AutoencodingEngine",
    "comfy.ldm.models.autoencoder:DiagonalGaussianRegularizer",
    "comfy.ldm.modules.diffusionmodules.model:AttnBlock",
    "comfy.ldm.modules.diffusionmodules.model:ResnetBlock.forward(self, x, temb, conv_carry_in, conv_carry_out)",
)

ARCHITECTURES = (
    HunyuanImageVAE(SIZES, "hunyuan_image_vae_decoder", Role.VAE_DECODER),
    HunyuanImageVAE(SIZES, "hunyuan_image_vae_encoder", Role.VAE_ENCODER),
)
