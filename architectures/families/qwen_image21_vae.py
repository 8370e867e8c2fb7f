"""The VAE of Qwen-Image 2.1: Wan 2.2's layers for pictures with alpha, whose convolutions see a single frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from comfy.ldm.wan.vae import CausalConv3d
from comfy.ldm.wan.vae2_2 import WanVAE

from .. import Role
from ..shapes import Range
from ..sizes import LATENT
from ..vae_sizes import SIZES, VAESizes
from . import wan_vae

PIXELS = 2 * LATENT

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class QwenImageVAE(VAESizes):
    """Decoder or encoder of a picture, (batch, channels, height, width)."""

    pixels = PIXELS
    colours = 4
    only_live = "layers of a video"
    free: ClassVar[Mapping[str, Range]] = {"B": Range(1, 1, 1), "H": Range(1, 22, 1 << 10), "W": Range(1, 26, 1 << 10)}
    traced: ClassVar[Mapping[str, int]] = {"B": 1, "H": 9, "W": 12}
    compared: ClassVar[Sequence[Mapping[str, int]]] = (traced,)

    def matches(self, module: torch.nn.Module) -> bool:
        """See ``Architecture``; older servers have no such VAE, nor its ``patch_size``."""
        return (
            type(module) is WanVAE and not module.attn_scales and getattr(module, "patch_size", None) == 1
            and 2 ** (len(module.dim_mult) - 1) == PIXELS and module.encoder.conv1.in_channels == self.colours
            and all(layer.kernel_size[0] == 1 for layer in module.modules() if type(layer) is CausalConv3d)
        )  # fmt: skip

    def channels(self, module: WanVAE) -> int:
        return module.z_dim

    def function(self, module: WanVAE) -> torch.nn.Module:
        return (_Decoder if self.decodes else _Encoder)(module)


class _Decoder(wan_vae._Decoder):
    """Wan's, for the first frame of a video."""

    def before(self, images: torch.Tensor) -> torch.Tensor:
        return super().before(images.unsqueeze(2))

    def behind(self, result: torch.Tensor) -> torch.Tensor:
        return result.squeeze(2)


class _Encoder(wan_vae._Encoder):
    """Wan's, for the first frame of a video."""

    def before(self, images: torch.Tensor) -> torch.Tensor:
        return images.unsqueeze(2)

    def behind(self, result: torch.Tensor) -> torch.Tensor:
        return super().behind(result).squeeze(2)


NEEDS = wan_vae.NEEDS
ARCHITECTURES = (
    QwenImageVAE(SIZES, "qwen_image21_vae_decoder", Role.VAE_DECODER),
    QwenImageVAE(SIZES, "qwen_image21_vae_encoder", Role.VAE_ENCODER),
)
