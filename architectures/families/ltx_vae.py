"""The decoder of LTX-2's VAE: small layers take a whole video, the large ones behind them take it in chunks of frames.

A convolution looks at the frames before and behind. So a chunk's last frame waits for the next chunk, and each layer
keeps frames for it. The chunks need not be native's: results are the same.

Files that condition the decoder on a timestep decode natively: they add noise. Videos are encoded natively.
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
from .wan_vae import Kept, last_frames

BUFFER = "output_buffer"
"""ComfyUI's tensor for the result, in main memory."""

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class LTXDecoder(VideoVAESizes):
    """Latents of a still or video -> pixels from -1 to 1."""

    pixels = 4 * LATENT
    each = 8
    only_live = "loops over chunks of frames"
    free: ClassVar[Mapping[str, Range]] = {  # several chunks; repeated edges need two elements, and sides differ
        **VideoVAESizes.free, "L": Range(0, 12, 1 << 10), "H": Range(2, 10, 1 << 9), "W": Range(3, 14, 1 << 9)}
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
        last = torch.nn.ModuleList([decoder.conv_norm_out, decoder.conv_act, decoder.conv_out])
        layers = _layers(decoder)
        for layer in layers:
            layer._buffers.pop("scale_shift_table", None)  # zeros, for files with timesteps
        self.blocks = (
            *in_blocks([decoder.conv_in], _convolved),
            *in_blocks([layer for layer in layers if isinstance(layer, ResnetBlock3D)], _residual),
            *in_blocks([layer for layer in layers if isinstance(layer, DepthToSpaceUpsample)], _enlarged),
            *in_blocks([last], _ended),
        )
        unfolds = [number for number, layer in enumerate(layers) if isinstance(layer, DepthToSpaceUpsample)]
        large = max(unfolds, default=len(layers))
        self._small, self._large = [decoder.conv_in, *layers[:large]], [*layers[large:], last]
        self._times = layers[large].stride[0] if unfolds else 1
        self._length = (2 * len(self._large) - 1) // self._times + 2  # each convolution keeps one; the last needs one

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        x, decoder = self.vae.per_channel_statistics.un_normalize(images), self.vae.decoder
        for step in self._small:
            x, _ = step(x, decoder.causal, (), True)
        count, kept = max(1, x.shape[2] // self._length), [()] * len(self._large)
        frames, done, result = self._times * x.shape[2] - (self._times - 1), 0, x
        for number in range(count):
            ends = number == count - 1
            h = x[:, :, number * self._length : None if ends else (number + 1) * self._length]
            for place, step in enumerate(self._large):
                h, kept[place] = step(h, decoder.causal, kept[place], ends)
            h = unpatchify(h, patch_size_hw=decoder.patch_size, patch_size_t=1)
            if number == 0:
                result = h.new_empty(*h.shape[:2], frames, *h.shape[3:])
            result[:, :, done : done + h.shape[2]] = h
            done += h.shape[2]
        return (result,)


def _convolved(
    conv: CausalConv3d, x: torch.Tensor, causal: bool, kept: Kept, ends: bool
) -> tuple[torch.Tensor, Kept]:
    """Convolve a chunk of frames with its neighbours. The first frame of a video is repeated in front of it.

    Args:
        causal: whether a frame sees none behind it; else the last frame of a video is repeated behind it.
        kept: the frames before the chunk; none for a video's first.
        ends: whether it is a video's last.

    Returns:
        The result, and the frames to keep for the next chunk.
    """
    more = conv.time_kernel_size - 1
    back = 0 if causal else more // 2
    joined = torch.cat([*kept, x], 2) if kept else x
    front, behind = 0 if kept else more - back, back if ends else 0
    inner = conv.conv
    if inner.padding_mode == "reflect":
        found = F.conv3d(with_edges(joined, front, behind, mirrored=True), inner.weight, inner.bias)
    else:
        found = inner(torch.cat([joined[:, :, :1]] * front + [joined] + [joined[:, :, -1:]] * behind, 2))
    return found, () if ends else (last_frames(joined, more),)


def _residual(
    block: ResnetBlock3D, x: torch.Tensor, causal: bool, kept: Kept, ends: bool
) -> tuple[torch.Tensor, Kept]:
    h, one = _convolved(block.conv1, block.non_linearity(block.norm1(x)), causal, kept[1:2], ends)
    h, two = _convolved(block.conv2, block.non_linearity(block.norm2(h)), causal, kept[2:], ends)
    x, own = _waited(x, h.shape[2], kept[:1], ends)
    if isinstance(block.norm3, LayerNorm):
        x = block.conv_shortcut(block.norm3.norm(x.movedim(1, -1)).movedim(-1, 1))
    return h + x, (*own, *one, *two)


def _enlarged(
    layer: DepthToSpaceUpsample, x: torch.Tensor, causal: bool, kept: Kept, ends: bool
) -> tuple[torch.Tensor, Kept]:
    """Unfold channels into frames and sides; the first of a video's new frames has no place."""
    first = 1 if layer.stride[0] == 2 and not kept else 0
    h, one = _convolved(layer.conv, x, causal, kept[1:], ends)
    found = _unfolded(h, layer.stride)[:, :, first:]
    x, own = _waited(x, h.shape[2], kept[:1], ends)
    if layer.residual:
        times = layer.stride[0] * layer.stride[1] * layer.stride[2] // layer.out_channels_reduction_factor
        found = found + _unfolded(x, layer.stride)[:, :, first:].repeat(1, times, 1, 1, 1)
    return found, (*own, *one)


def _waited(x: torch.Tensor, frames: int, kept: Kept, ends: bool) -> tuple[torch.Tensor, Kept]:
    """Return the frames of a layer's input that belong to its result, which waited for others; and those to keep."""
    joined = torch.cat([*kept, x], 2) if kept else x
    return joined[:, :, :frames], () if ends else (last_frames(joined, joined.shape[2] - frames),)


def _unfolded(x: torch.Tensor, stride: tuple[int, int, int]) -> torch.Tensor:
    parts = x.unflatten(1, (-1, *stride)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return parts.flatten(2, 3).flatten(3, 4).flatten(4, 5)


def _ended(
    layers: torch.nn.ModuleList, x: torch.Tensor, causal: bool, kept: Kept, ends: bool
) -> tuple[torch.Tensor, Kept]:
    norm, activation, conv = layers
    return _convolved(conv, activation(norm(x)), causal, kept, ends)


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
