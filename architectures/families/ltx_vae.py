"""The decoder of LTX-2's VAE: convolutions over a whole video at once, which is small until its pixels are unfolded.

Native decodes in chunks, with the same result. Files that condition the decoder on a timestep decode natively: they add
noise. Videos are encoded natively.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from comfy.ldm.lightricks.vae.causal_conv3d import CausalConv3d
from comfy.ldm.lightricks.vae.causal_video_autoencoder import (
    DepthToSpaceUpsample,
    LayerNorm,
    ResnetBlock3D,
    UNetMidBlock3D,
    VideoVAE,
    unpatchify,
)
from comfy.ldm.lightricks.vae.pixel_norm import PixelNorm

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall
from ..shapes import Range
from ..sizes import LATENT
from ..vae_sizes import SIZES, VideoVAESizes, bind_images
from .autoencoder import with_edges

BUFFER = "output_buffer"
"""ComfyUI's tensor for the result, in main memory."""

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class LTXDecoder(VideoVAESizes):
    """Latents of a still or video -> pixels from -1 to 1."""

    pixels = 4 * LATENT
    each = 8
    only_live = "convolutions over all frames at once"
    free: ClassVar[Mapping[str, Range]] = {
        **VideoVAESizes.free, "H": Range(2, 10, 1 << 9), "W": Range(2, 14, 1 << 9)}  # repeated edges need two
    traced: ClassVar[Mapping[str, int]] = {"B": 1, "L": 2, "H": 5, "W": 4}
    compared: ClassVar[tuple] = ({"B": 1, "L": 0, "H": 3, "W": 4},)

    def matches(self, module: torch.nn.Module) -> bool:
        return type(module) is VideoVAE and not module.timestep_conditioning and _is_known(module.decoder)

    def channels(self, module: VideoVAE) -> int:
        return module.decoder.conv_in.in_channels

    def function(self, module: VideoVAE) -> torch.nn.Module:
        return _Decoder(module)

    def binding(self, module: VideoVAE) -> Binding:
        return _bind


def _is_known(decoder: torch.nn.Module) -> bool:
    """Tell whether a decoder has layers of known kinds alone, which draw no noise and look at single elements."""
    layers = list(_layers(decoder))
    residual = [layer for layer in layers if type(layer) is ResnetBlock3D]
    return (
        all(type(layer) in (ResnetBlock3D, DepthToSpaceUpsample) for layer in layers)
        and not any(layer.inject_noise or layer.timestep_conditioning for layer in residual)
        and all(type(norm) is PixelNorm for layer in residual for norm in (layer.norm1, layer.norm2))
        and type(decoder.conv_norm_out) is PixelNorm
    )


def _layers(decoder: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers between the first and the last convolution."""
    found: list[torch.nn.Module] = []
    for layer in decoder.up_blocks:
        found += layer.res_blocks if isinstance(layer, UNetMidBlock3D) else [layer]
    return found


def _bind(call: Mapping[str, Any]) -> EngineCall:
    bound, buffer = bind_images({name: value for name, value in call.items() if name != BUFFER}), call.get(BUFFER)
    return bound if buffer is None else replace(bound, finish=lambda outputs: buffer.copy_(outputs["result"]))


class _Decoder(torch.nn.Module):
    def __init__(self, vae: VideoVAE):
        super().__init__()
        vae.encoder = torch.nn.Identity()
        self.vae = vae
        decoder = vae.decoder
        self.last = torch.nn.ModuleList([decoder.conv_norm_out, decoder.conv_act, decoder.conv_out])
        layers = _layers(decoder)
        for layer in layers:
            layer._buffers.pop("scale_shift_table", None)  # zeros, for files with timesteps
        self.blocks = (
            *in_blocks([decoder.conv_in], _convolved),
            *in_blocks([layer for layer in layers if isinstance(layer, ResnetBlock3D)], _residual),
            *in_blocks([layer for layer in layers if isinstance(layer, DepthToSpaceUpsample)], _enlarged),
            *in_blocks([self.last], _ended),
        )
        self._steps = [decoder.conv_in, *layers, self.last]

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        x, decoder = self.vae.per_channel_statistics.un_normalize(images), self.vae.decoder
        for step in self._steps:
            x = step(x, decoder.causal)
        return (unpatchify(x, patch_size_hw=decoder.patch_size, patch_size_t=1),)


def _convolved(conv: CausalConv3d, x: torch.Tensor, causal: bool) -> torch.Tensor:
    """Convolve a video, whose first and last frames are repeated; only the first where it is causal."""
    more = conv.time_kernel_size - 1
    front, back = (more, 0) if causal else (more // 2, more // 2)
    inner = conv.conv
    if inner.padding_mode != "reflect":
        return inner(torch.cat([x[:, :, :1]] * front + [x] + [x[:, :, -1:]] * back, 2))
    return F.conv3d(with_edges(x, front, back, mirrored=True), inner.weight, inner.bias)


def _residual(block: ResnetBlock3D, x: torch.Tensor, causal: bool) -> torch.Tensor:
    h = _convolved(block.conv1, block.non_linearity(block.norm1(x)), causal)
    h = _convolved(block.conv2, block.non_linearity(block.norm2(h)), causal)
    if isinstance(block.norm3, LayerNorm):
        x = block.conv_shortcut(block.norm3.norm(x.movedim(1, -1)).movedim(-1, 1))
    return h + x


def _enlarged(layer: DepthToSpaceUpsample, x: torch.Tensor, causal: bool) -> torch.Tensor:
    """Unfold channels into frames and sides; the first of the new frames has no place."""
    first = 1 if layer.stride[0] == 2 else 0
    found = _unfolded(_convolved(layer.conv, x, causal), layer.stride)[:, :, first:]
    if not layer.residual:
        return found
    times = layer.stride[0] * layer.stride[1] * layer.stride[2] // layer.out_channels_reduction_factor
    return found + _unfolded(x, layer.stride)[:, :, first:].repeat(1, times, 1, 1, 1)


def _unfolded(x: torch.Tensor, stride: tuple[int, int, int]) -> torch.Tensor:
    parts = x.unflatten(1, (-1, *stride)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return parts.flatten(2, 3).flatten(3, 4).flatten(4, 5)


def _ended(layers: torch.nn.ModuleList, x: torch.Tensor, causal: bool) -> torch.Tensor:
    norm, activation, conv = layers
    return _convolved(conv, activation(norm(x)), causal)


_PLACE = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
NEEDS = (
    "comfy.ldm.lightricks.vae.causal_conv3d:CausalConv3d.forward(self, x, causal)",
    f"{_PLACE}:DepthToSpaceUpsample.forward(self, x, causal, timestep)",
    f"{_PLACE}:LayerNorm",
    f"{_PLACE}:ResnetBlock3D.forward(self, input_tensor, causal, timestep)",
    f"{_PLACE}:UNetMidBlock3D",
    f"{_PLACE}:VideoVAE.decode(self, x, output_buffer)",
    f"{_PLACE}:unpatchify(x, patch_size_hw, patch_size_t)",
    "comfy.ldm.lightricks.vae.pixel_norm:PixelNorm",
)

ARCHITECTURES = (LTXDecoder(SIZES, "ltx_vae_decoder", Role.VAE_DECODER),)
