"""VAEs of still images as engines: the KL autoencoders of SD1.5, SDXL, SD3, Flux, Flux.2 and Z-Image, and TAESD.

A VAE has two networks, decoder and encoder, in one module. Each is an architecture of its own, and gets an engine only
where a graph calls it. ComfyUI calls them once per picture, so they are compiled and not captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine, DiagonalGaussianRegularizer
from comfy.ldm.modules.diffusionmodules.model import AttnBlock, Decoder, Encoder
from comfy.taesd.taesd import TAESD, DecoderFlux2

from .. import Role
from ..calls import Binding, EngineCall, refuse_all_but
from ..shapes import Dim, Picture, Profile, Range, RequestedSizes, Sizes, TensorSpec
from ..sizes import BATCH, LATENT, LatentSizes

CHANNELS = 3
FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class AutoencoderSizes(LatentSizes):
    """Sizes of a single picture without a prompt. ComfyUI's batches are split, so that a call fits every batch.

    Attributes:
        working_values: numbers that a compiled call holds at its peak, for each pixel; from benchmarks/vae.py, with
            a tenth more. TAESD's encoder was not measured and has its decoder's number. Autoencoders of 16 px have the
            layers, and the numbers, of autoencoders of 8 px.
        pixels: along each side of a latent element.
    """

    name: str
    role: Role
    working_values: int
    pixels: int = LATENT

    per_step = False
    usual_batch = 1
    arguments = ("images",)

    def _ranges(self, asked: RequestedSizes) -> dict[str, Range]:
        own = super()._ranges(asked)
        return {"B": Range(1, 1, 1), "H": own["H"], "W": own["W"]}

    def words(self, profile: Profile) -> str:
        """See ``Architecture``: ``256 to 1024 px``."""
        return super().words(profile.only("HW"))

    def _batches(self, picture: Picture) -> Sequence[int]:
        """See ``NetworkSizes``: one call, whatever the batch."""
        return (1,)

    def working_memory(self, call: Mapping[str, int], dtype: torch.dtype) -> int:
        """Return the bytes that a compiled call needs besides its weights."""
        return self.working_values * self.pixels**2 * call["H"] * call["W"] * dtype.itemsize

    def inputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        """See ``Architecture``: a latent, or pixels from -1 to 1."""
        return [self._spec("images", module, dtype, latent=self.role is Role.VAE_DECODER)]

    def outputs(self, module: torch.nn.Module, dtype: str) -> list[TensorSpec]:
        return [self._spec("result", module, dtype, latent=self.role is Role.VAE_ENCODER)]

    def _spec(self, name: str, module: torch.nn.Module, dtype: str, latent: bool) -> TensorSpec:
        channels, pixels = (_channels(module), 1) if latent else (CHANNELS, self.pixels)
        return TensorSpec(name, dtype, (BATCH, channels, Dim("H", up=pixels), Dim("W", up=pixels)))

    def binding(self, module: torch.nn.Module) -> Binding:
        return _bind

    def function(self, module: torch.nn.Module) -> torch.nn.Module:
        for layer in module.modules():
            if isinstance(layer, AttnBlock):
                layer.optimized_attention = attention
        if self.role is Role.VAE_DECODER:
            return _Half(module, "decode")
        return _Half(module, "encode") if getattr(module, "bn", None) is None else _EncoderWithStatistics(module)


class KLAutoencoder(AutoencoderSizes):
    """A KL autoencoder, with or without layers around the latent, and with or without statistics of the latent.

    Statistics go with elements of 16 px: each folds four elements of 8 px.
    """

    def matches(self, module: torch.nn.Module) -> bool:
        return (
            type(module) in (AutoencoderKL, AutoencodingEngine)
            and type(module.encoder) is Encoder
            and type(module.decoder) is Decoder
            and isinstance(module.decoder.conv_in, torch.nn.Conv2d)
            and type(module.regularization) is DiagonalGaussianRegularizer
            and not module.regularization.sample
            and _pixels_per_element(module) == self.pixels
        )


class TinyAutoencoder(AutoencoderSizes):
    """TAESD; that of Flux.2 folds four elements of 8 px into one."""

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is TAESD and (16 if _folds(module) else LATENT) == self.pixels


def _pixels_per_element(module: AutoencodingEngine) -> int:
    return 2 ** (module.decoder.num_resolutions - 1) * (1 if getattr(module, "bn", None) is None else 2)


def _folds(module: TAESD) -> bool:
    return isinstance(module.taesd_decoder, DecoderFlux2)


def _channels(module: torch.nn.Module) -> int:
    """Return the channels of the latent."""
    if isinstance(module, TAESD):
        return module.taesd_decoder[1].in_channels * (4 if _folds(module) else 1)
    if getattr(module, "bn", None) is not None:
        return module.bn.num_features
    first = getattr(module, "post_quant_conv", None) or module.decoder.conv_in
    return first.in_channels


def _bind(call: Mapping[str, Any]) -> EngineCall:
    images = call["images"]
    refuse_all_but(call, {"images"})

    def finish(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return outputs["result"].to(images.device, images.dtype)

    return EngineCall({"images": images}, finish)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention of all elements of a picture, with a single head; tensors are (batch, channels, H, W)."""
    rows = [t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (q, k, v)]
    return F.scaled_dot_product_attention(*rows).squeeze(1).transpose(1, 2).reshape(q.shape)


class _Half(torch.nn.Module):
    """Decoder or encoder of a VAE."""

    def __init__(self, vae: torch.nn.Module, method: str):
        super().__init__()
        self.vae = vae
        self.method = method

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (getattr(self.vae, self.method)(tensor),)


class _EncoderWithStatistics(torch.nn.Module):
    """Encoder of a VAE with statistics of its latent, written out: the exporter cannot fold and normalise at once."""

    def __init__(self, vae: AutoencoderKL):
        super().__init__()
        self.vae = vae

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        vae = self.vae
        latent, _ = vae.regularization(vae.quant_conv(vae.encoder(tensor)))
        folded = F.pixel_unshuffle(latent, 2)
        mean, variance = (t.to(latent.dtype).view(1, -1, 1, 1) for t in (vae.bn.running_mean, vae.bn.running_var))
        return ((folded - mean) / torch.sqrt(variance + vae.bn_eps),)


_SIZES = Sizes("VAE", 64, 1024, 1536)
NEEDS = (
    "comfy.ldm.models.autoencoder:AutoencoderKL",
    "comfy.ldm.models.autoencoder:AutoencodingEngine",
    "comfy.ldm.models.autoencoder:DiagonalGaussianRegularizer",
    "comfy.ldm.modules.diffusionmodules.model:AttnBlock",
    "comfy.ldm.modules.diffusionmodules.model:Decoder",
    "comfy.ldm.modules.diffusionmodules.model:Encoder",
    "comfy.taesd.taesd:DecoderFlux2",
    "comfy.taesd.taesd:TAESD",
)

ARCHITECTURES = (
    KLAutoencoder(_SIZES, "kl_vae_decoder", Role.VAE_DECODER, 860),
    KLAutoencoder(_SIZES, "kl_vae_encoder", Role.VAE_ENCODER, 580),
    KLAutoencoder(_SIZES, "kl_vae_16_decoder", Role.VAE_DECODER, 860, 16),
    KLAutoencoder(_SIZES, "kl_vae_16_encoder", Role.VAE_ENCODER, 580, 16),
    TinyAutoencoder(_SIZES, "taesd_decoder", Role.VAE_DECODER, 260),
    TinyAutoencoder(_SIZES, "taesd_encoder", Role.VAE_ENCODER, 260),
    TinyAutoencoder(_SIZES, "taesd_16_decoder", Role.VAE_DECODER, 260, 16),
    TinyAutoencoder(_SIZES, "taesd_16_encoder", Role.VAE_ENCODER, 260, 16),
)
