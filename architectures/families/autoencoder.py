"""VAEs of still images as engines: the KL autoencoders of SD1.5, SDXL, SD3, Flux, Flux.2 and Z-Image, and TAESD.

A VAE has two networks, decoder and encoder, in one module. Each is an architecture of its own, and gets an engine only
where a graph calls it. ComfyUI calls them once per picture, so they are compiled and not captured as CUDA graphs.
Layers of KL autoencoders are compiled once for each kind, TAESD whole; each for all sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine, DiagonalGaussianRegularizer
from comfy.ldm.modules.diffusionmodules.model import AttnBlock, Decoder, Encoder, Upsample
from comfy.taesd.taesd import TAESD, DecoderFlux2

from .. import Role
from ..blocks import in_blocks
from ..sizes import LATENT
from ..vae_sizes import SIZES, VAESizes

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class AutoencoderSizes(VAESizes):
    """Sizes of a still, and the memory that it takes.

    Attributes:
        working_values: numbers that a compiled call holds at its peak, for each pixel; from benchmarks/vae.py, with
            a tenth more. TAESD's encoder was not measured and has its decoder's number. Autoencoders of 16 px have the
            layers, and the numbers, of autoencoders of 8 px.
        pixels: along each side of a latent element.
    """

    working_values: int
    pixels: int = LATENT

    def working_memory(self, call: Mapping[str, int], dtype: torch.dtype) -> int:
        """Return the bytes that a compiled call needs besides its weights."""
        return self.working_values * self.pixels**2 * call["H"] * call["W"] * dtype.itemsize

    def channels(self, module: torch.nn.Module) -> int:
        if isinstance(module, TAESD):
            return module.taesd_decoder[1].in_channels * (4 if _folds(module) else 1)
        if getattr(module, "bn", None) is not None:
            return module.bn.num_features
        first = getattr(module, "post_quant_conv", None) or module.decoder.conv_in
        return first.in_channels


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
            and not module.decoder.tanh_out
            and _pixels_per_element(module) == self.pixels
        )

    def function(self, module: torch.nn.Module) -> torch.nn.Module:
        return (_Decoder if self.decodes else _Encoder)(module)


class TinyAutoencoder(AutoencoderSizes):
    """TAESD; that of Flux.2 folds four elements of 8 px into one."""

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is TAESD and (16 if _folds(module) else LATENT) == self.pixels

    def function(self, module: torch.nn.Module) -> torch.nn.Module:
        return _Tiny(module, self.decodes)


def _pixels_per_element(module: AutoencodingEngine) -> int:
    return 2 ** (module.decoder.num_resolutions - 1) * (1 if getattr(module, "bn", None) is None else 2)


def _folds(module: TAESD) -> bool:
    return isinstance(module.taesd_decoder, DecoderFlux2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention of all elements of a picture, with a single head; tensors are (batch, channels, H, W)."""
    rows = [t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (q, k, v)]
    return F.scaled_dot_product_attention(*rows).squeeze(1).transpose(1, 2).reshape(q.shape)


def doubled(images: torch.Tensor) -> torch.Tensor:
    """Return images, (batch, channels, height, width), with each element repeated along both sides."""
    if torch.onnx.is_in_onnx_export():  # engines in files have an operation for it
        return F.interpolate(images, scale_factor=2.0, mode="nearest")
    batch, channels, height, width = images.shape
    large = images[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return large.reshape(batch, channels, 2 * height, 2 * width)


def with_edges(video: torch.Tensor, front: int, back: int = 0, mirrored: bool = False) -> torch.Tensor:
    """Return a video, (batch, channels, frames, height, width), with its edges repeated.

    It is what torch's padding gives, but an element's channels stay together in memory, as convolutions read them, and
    are copied together: on an H200 torch's padding took three quarters of a decode.

    Args:
        front, back: how often the first and the last frame are repeated.
        mirrored: whether the new row or column on each side is the one behind the edge.
    """
    frames, height, width = video.shape[2:]
    numbers = partial(torch.arange, device=video.device)
    inside = _mirrored if mirrored else _repeated
    times = _repeated(numbers(-front, frames + back), frames)
    rows = inside(numbers(-1, height + 1), height)
    # counted up: compiled, what is made of sizes alone would be computed anew for each element of the video
    columns = inside(numbers(width + 2).clamp(0, 1).cumsum(0) - 1, width)
    places = (times[:, None, None] * height + rows[:, None]) * width + columns
    return video.movedim(1, -1).flatten(1, 3)[:, places].movedim(-1, 1)


def _repeated(places: torch.Tensor, size: int) -> torch.Tensor:
    return places.clamp(0, size - 1)


def _mirrored(places: torch.Tensor, size: int) -> torch.Tensor:
    return size - 1 - (size - 1 - places.abs()).abs()


class _Decoder(torch.nn.Module):
    """Latents -> pixels, by the layers of a KL autoencoder."""

    def __init__(self, vae: torch.nn.Module):
        super().__init__()
        half, vae.encoder = vae.decoder, torch.nn.Identity()
        self.vae = vae
        first = [*filter(None, [getattr(vae, "post_quant_conv", None)]), half.conv_in]
        self.blocks = _blocks(first, [*_middle(half), *_levels(reversed(half.up))], [half.norm_out, half.conv_out])

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        if getattr(self.vae, "bn", None) is not None:
            mean, deviation = _statistics(self.vae, images)
            images = F.pixel_shuffle(images * deviation + mean, 2)
        return (_in_a_row(self.blocks, images),)


class _Encoder(torch.nn.Module):
    """Pixels -> means of latents, by the layers of a KL autoencoder; deviations are not used."""

    def __init__(self, vae: torch.nn.Module):
        super().__init__()
        half, vae.decoder = vae.encoder, torch.nn.Identity()
        self.vae = vae
        last = [half.norm_out, half.conv_out, *filter(None, [getattr(vae, "quant_conv", None)])]
        self.blocks = _blocks([half.conv_in], [*_levels(half.down), *_middle(half)], last)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        latent = _in_a_row(self.blocks, images).chunk(2, 1)[0]
        if getattr(self.vae, "bn", None) is not None:
            mean, deviation = _statistics(self.vae, latent)
            latent = (F.pixel_unshuffle(latent, 2) - mean) / deviation
        return (latent,)


class _Tiny(torch.nn.Module):
    """One half of a TAESD, which is a single block."""

    def __init__(self, vae: TAESD, decodes: bool):
        super().__init__()
        self.vae, self.decodes = vae, decodes
        half = vae.taesd_decoder if decodes else vae.taesd_encoder
        for number, layer in enumerate(half):
            if isinstance(layer, torch.nn.Upsample):
                half[number] = _Doubled()
        self.blocks = in_blocks([half])

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        return ((self.vae.decode if self.decodes else self.vae.encode)(images),)


class _Doubled(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return doubled(images)


def _middle(half: torch.nn.Module) -> list[torch.nn.Module]:
    return [half.mid.block_1, half.mid.attn_1, half.mid.block_2]


def _levels(levels: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the layers of levels of the picture's size, in the order of native's forward."""
    for level in levels:
        for number, block in enumerate(level.block):
            yield block
            yield from level.attn[number : number + 1]
        yield from filter(None, (getattr(level, name, None) for name in ("upsample", "downsample")))


def _blocks(
    first: Sequence[torch.nn.Module], layers: Iterable[torch.nn.Module], last: Sequence[torch.nn.Module]
) -> tuple[torch.nn.Module, ...]:
    """Return blocks: convolutions that begin, layers, then a norm with the convolutions behind it."""
    found = [torch.nn.Sequential(*first)]
    for layer in layers:
        if isinstance(layer, Upsample):
            in_blocks([layer], _enlarged)
        elif isinstance(layer, AttnBlock):
            layer.optimized_attention = attention
        found.append(layer)
    norm, *convs = last
    return in_blocks([*found, torch.nn.Sequential(norm, torch.nn.SiLU(), *convs)])


def _enlarged(layer: Upsample, images: torch.Tensor) -> torch.Tensor:
    large = doubled(images)
    return layer.conv(large) if layer.with_conv else large


def _in_a_row(blocks: Iterable[torch.nn.Module], images: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        images = block(images)
    return images


def _statistics(vae: torch.nn.Module, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means and deviations of a latent's channels."""
    mean, variance = (t.to(like.dtype).view(1, -1, 1, 1) for t in (vae.bn.running_mean, vae.bn.running_var))
    return mean, torch.sqrt(variance + vae.bn_eps)


NEEDS = (
    "comfy.ldm.models.autoencoder:AutoencoderKL",
    "comfy.ldm.models.autoencoder:AutoencodingEngine",
    "comfy.ldm.models.autoencoder:DiagonalGaussianRegularizer",
    "comfy.ldm.modules.diffusionmodules.model:AttnBlock",
    "comfy.ldm.modules.diffusionmodules.model:Decoder",
    "comfy.ldm.modules.diffusionmodules.model:Encoder",
    "comfy.ldm.modules.diffusionmodules.model:Upsample",
    "comfy.taesd.taesd:DecoderFlux2",
    "comfy.taesd.taesd:TAESD",
)

ARCHITECTURES = (
    KLAutoencoder(SIZES, "kl_vae_decoder", Role.VAE_DECODER, 860),
    KLAutoencoder(SIZES, "kl_vae_encoder", Role.VAE_ENCODER, 580),
    KLAutoencoder(SIZES, "kl_vae_16_decoder", Role.VAE_DECODER, 860, 16),
    KLAutoencoder(SIZES, "kl_vae_16_encoder", Role.VAE_ENCODER, 580, 16),
    TinyAutoencoder(SIZES, "taesd_decoder", Role.VAE_DECODER, 260),
    TinyAutoencoder(SIZES, "taesd_encoder", Role.VAE_ENCODER, 260),
    TinyAutoencoder(SIZES, "taesd_16_decoder", Role.VAE_DECODER, 260, 16),
    TinyAutoencoder(SIZES, "taesd_16_encoder", Role.VAE_ENCODER, 260, 16),
)
