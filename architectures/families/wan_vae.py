"""VAEs of Wan 2.1 and 2.2, which Qwen-Image, Krea 2 and Anima have too: a video in chunks, a still as its first frame.

The first latent frame stands for one frame, each later one for four. A chunk is the frames of one latent frame. Causal
convolutions read the last two frames of the chunk before, which the chunks hand on. In front of a video these are
zeros. Native computes the same in chunks of other lengths.

The blocks are compiled for each number of frames. A first chunk has a single frame, so its convolutions are those of a
picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from comfy.ldm.wan import vae as wan21
from comfy.ldm.wan import vae2_2 as wan22

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding, EngineCall
from ..sizes import EACH, LATENT
from ..vae_sizes import SIZES, VideoVAESizes, bind_images
from .autoencoder import attention, doubled

KEPT = 2
"""Frames that a causal convolution reads of the chunk before."""

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""

Kept = tuple[torch.Tensor, ...]
"""Frames that a layer reads of the chunk before."""


@dataclass(frozen=True)
class WanAutoencoder(VideoVAESizes):
    """Decoder or encoder of a video.

    Attributes:
        still_values: numbers that a compiled call holds at its peak, for each pixel; ``video_values`` those for a
            video.
    """

    still_values: int
    video_values: int
    pixels: int = LATENT
    module: type[torch.nn.Module] = wan21.WanVAE

    only_live = "frames that are computed from frames before them"

    def matches(self, module: torch.nn.Module) -> bool:
        colours = module.encoder.conv1.in_channels // _patch(module) ** 2 if type(module) is self.module else 0
        return colours == self.colours and not module.attn_scales and _pixels(module) == self.pixels

    def working_memory(self, call: Mapping[str, int], dtype: torch.dtype) -> int:
        """Return the bytes that a compiled call needs besides its weights."""
        values = self.video_values if call["L"] else self.still_values
        return values * self.pixels**2 * call["H"] * call["W"] * dtype.itemsize

    def channels(self, module: torch.nn.Module) -> int:
        return module.z_dim

    def binding(self, module: torch.nn.Module) -> Binding:
        return bind_images if self.decodes else bind_pixels

    def function(self, module: torch.nn.Module) -> torch.nn.Module:
        return (_Decoder if self.decodes else _Encoder)(module)


def _patch(module: torch.nn.Module) -> int:
    """Return the pixels that are folded into channels, along each side."""
    return 2 if isinstance(module, wan22.WanVAE) else 1


def _pixels(module: torch.nn.Module) -> int:
    """Return the pixels of a latent element, along each side."""
    return 2 ** (len(module.dim_mult) - 1) * _patch(module)


def bind_pixels(call: Mapping[str, Any]) -> EngineCall:
    """Leave frames out that make no whole latent frame, as native does."""
    images = call["images"]
    return bind_images({**call, "images": images[:, :, : 1 + (images.shape[2] - 1) // EACH * EACH]})


class _InChunks(torch.nn.Module):
    """One half of a VAE, chunk by chunk.

    Attributes:
        length: frames that it reads for each chunk but the first, and ``gives`` those that it returns for it.
    """

    length = gives = 1

    def __init__(self, first: torch.nn.Module, layers: Sequence[torch.nn.Module], last: torch.nn.Module):
        super().__init__()
        self._steps = [
            *((step, None) for step in in_blocks([first], _convolved)),
            *(step for layer in layers for step in _steps(layer)),
            *((step, None) for step in in_blocks([last], _ended)),
        ]
        blocks = [part for step, around in self._steps for part in (step, around) if part is not None]
        self.blocks = tuple(dict.fromkeys(blocks))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        given = self.before(images)
        count = 1 + (given.shape[2] - 1) // self.length
        kept: list[Kept] | None = None
        result = None
        for number in range(count):
            start = 1 + self.length * (number - 1)
            chunk = given[:, :, max(0, start) : start + self.length]
            x, kept = self._chunk(chunk, kept, more=number < count - 1)
            if result is None:
                result = x.new_empty(*x.shape[:2], 1 + self.gives * (count - 1), *x.shape[3:])
            place = 1 + self.gives * (number - 1)
            result[:, :, max(0, place) : place + self.gives] = x
        return (self.behind(result),)

    def before(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def behind(self, result: torch.Tensor) -> torch.Tensor:
        return result

    def _chunk(self, x: torch.Tensor, kept: list[Kept] | None, more: bool) -> tuple[torch.Tensor, list[Kept]]:
        """Compute a chunk.

        Args:
            kept: of the chunk before; None for the first.
            more: whether another chunk comes.
        """
        found: list[Kept] = []
        outside: torch.Tensor | None = None
        for step, around in self._steps:
            if step is None:
                x, outside = (x, x) if around is None else (around(x, outside, x.shape[2], kept is None), None)
                continue
            own = () if kept is None else kept.pop(0)
            given = x
            x, made = step(x, own, x.shape[2])
            if more:
                found.append(_begun(step, given, made) if kept is None else made)
        return x, found


class _Decoder(_InChunks):
    gives = EACH

    def __init__(self, vae: torch.nn.Module):
        half, vae.encoder = vae.decoder, torch.nn.Identity()
        super().__init__(half.conv1, [*half.middle, *half.upsamples], half.head)
        self.vae = vae

    def before(self, images: torch.Tensor) -> torch.Tensor:
        return F.conv3d(images, self.vae.conv2.weight, self.vae.conv2.bias)

    def behind(self, result: torch.Tensor) -> torch.Tensor:
        return wan22.unpatchify(result, _patch(self.vae))


class _Encoder(_InChunks):
    length = EACH

    def __init__(self, vae: torch.nn.Module):
        half, vae.decoder = vae.encoder, torch.nn.Identity()
        super().__init__(half.conv1, [*half.downsamples, *half.middle], half.head)
        self.vae = vae

    def before(self, images: torch.Tensor) -> torch.Tensor:
        return wan22.patchify(images, _patch(self.vae))

    def behind(self, result: torch.Tensor) -> torch.Tensor:
        """Return the means; deviations are not used."""
        conv, channels = self.vae.conv1, self.vae.z_dim
        return F.conv3d(result, conv.weight[:channels], conv.bias[:channels])


_Step = tuple[torch.nn.Module | None, torch.nn.Module | None]
"""A block; or the beginning (None, None) and the end (None, block) of layers that another block goes around."""


def _steps(layer: torch.nn.Module) -> Iterator[_Step]:
    """Yield the steps of a layer."""
    if isinstance(layer, wan21.ResidualBlock | wan22.ResidualBlock):
        yield from ((block, None) for block in in_blocks([layer], _residual))
    elif isinstance(layer, wan21.AttentionBlock):
        yield from ((block, None) for block in in_blocks([layer], _attended))
    elif isinstance(layer, wan21.Resample | wan22.Resample):
        compute = _enlarged if layer.mode.startswith("up") else _reduced
        yield from ((block, None) for block in in_blocks([layer], compute))
    else:
        around = layer.avg_shortcut
        if around is not None:
            yield None, None
        for part in layer.upsamples if isinstance(layer, wan22.Up_ResidualBlock) else layer.downsamples:
            yield from _steps(part)
        if around is not None:
            yield from ((None, block) for block in in_blocks([around], _added))


def _begun(step: torch.nn.Module, given: torch.Tensor, made: Kept) -> Kept:
    """Return what the second chunk reads of a first one: zeros are in front of it."""
    mode = getattr(step, "mode", "")
    if mode == "upsample3d":
        return (given.new_zeros(*given.shape[:2], KEPT, *given.shape[3:]),)
    if mode == "downsample3d":
        return made
    return tuple(torch.cat([torch.zeros_like(frame), frame], 2) for frame in made)


def _causal(conv: torch.nn.Module, x: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve frames with those before them; return the result, and what the next chunk reads."""
    if not kept:  # a single frame behind zeros
        found = F.conv2d(x.squeeze(2), conv.weight[:, :, -1], conv.bias, padding=conv.padding[1:])
        return found.unsqueeze(2), x
    frames = torch.cat([*kept, x], 2)
    return F.conv3d(frames, conv.weight, conv.bias, padding=conv.padding), last_frames(frames, KEPT)


def last_frames(frames: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last frames in memory of their own; compilers leave a clone out, which keeps all frames in memory."""
    return frames.flip(2)[:, :, :count].flip(2)


def _convolved(conv: torch.nn.Module, x: torch.Tensor, kept: Kept, frames: int) -> tuple[torch.Tensor, Kept]:
    found, more = _causal(conv, x, kept)
    return found, (more,)


def _ended(layers: torch.nn.Sequential, x: torch.Tensor, kept: Kept, frames: int) -> tuple[torch.Tensor, Kept]:
    norm, activation, conv = layers
    found, more = _causal(conv, activation(norm(x)), kept)
    return found, (more,)


def _residual(block: torch.nn.Module, x: torch.Tensor, kept: Kept, frames: int) -> tuple[torch.Tensor, Kept]:
    first, activation, one, second, _, _, two = block.residual
    h, more = _causal(one, activation(first(x)), kept[:1])
    h, last = _causal(two, activation(second(h)), kept[1:])
    short = block.shortcut
    own = x if isinstance(short, torch.nn.Identity) else F.conv3d(x, short.weight, short.bias)
    return own + h, (more, last)


def _attended(block: torch.nn.Module, x: torch.Tensor, kept: Kept, frames: int) -> tuple[torch.Tensor, Kept]:
    """Attend within each frame."""
    images = x.movedim(2, 1).flatten(0, 1)
    q, k, v = block.to_qkv(block.norm(images)).chunk(3, 1)
    found = block.proj(attention(q, k, v)).unflatten(0, (-1, frames)).movedim(1, 2)
    return found + x, ()


def _enlarged(layer: torch.nn.Module, x: torch.Tensor, kept: Kept, frames: int) -> tuple[torch.Tensor, Kept]:
    """Double the sides, and behind the first chunk the frames too where the layer does."""
    made: Kept = ()
    if kept:
        x, more = _causal(layer.time_conv, x, kept)
        x, made, frames = x.unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3), (more,), 2 * frames
    large = layer.resample[1](doubled(x.movedim(2, 1).flatten(0, 1)))
    return large.unflatten(0, (-1, frames)).movedim(1, 2), made


def _reduced(layer: torch.nn.Module, x: torch.Tensor, kept: Kept, frames: int) -> tuple[torch.Tensor, Kept]:
    """Halve the sides, and behind the first chunk the frames too where the layer does."""
    small = layer.resample(x.movedim(2, 1).flatten(0, 1)).unflatten(0, (-1, frames)).movedim(1, 2)
    if layer.mode == "downsample2d":
        return small, ()
    if not kept:
        return small, (small,)
    together, conv = torch.cat([*kept, small], 2), layer.time_conv
    return F.conv3d(together, conv.weight, conv.bias, stride=conv.stride), (last_frames(small, 1),)


def _added(
    around: torch.nn.Module, x: torch.Tensor, outside: torch.Tensor, frames: int, first: bool
) -> torch.Tensor:
    """Add what goes around some layers: native's average or repetition of their input."""
    own = type(around).forward
    return x + (own(around, outside, first) if isinstance(around, wan22.DupUp3D) else own(around, outside))


NEEDS = (
    "comfy.ldm.wan.vae:AttentionBlock",
    "comfy.ldm.wan.vae:Resample",
    "comfy.ldm.wan.vae:ResidualBlock",
    "comfy.ldm.wan.vae:WanVAE",
    "comfy.ldm.wan.vae2_2:DupUp3D.forward(self, x, first_chunk)",
    "comfy.ldm.wan.vae2_2:Resample",
    "comfy.ldm.wan.vae2_2:ResidualBlock",
    "comfy.ldm.wan.vae2_2:Up_ResidualBlock",
    "comfy.ldm.wan.vae2_2:WanVAE",
    "comfy.ldm.wan.vae2_2:patchify(x, patch_size)",
    "comfy.ldm.wan.vae2_2:unpatchify(x, patch_size)",
)

ARCHITECTURES = (
    WanAutoencoder(SIZES, "wan21_vae_decoder", Role.VAE_DECODER, 800, 5000),
    WanAutoencoder(SIZES, "wan21_vae_encoder", Role.VAE_ENCODER, 1000, 4300),
    WanAutoencoder(SIZES, "wan22_vae_decoder", Role.VAE_DECODER, 4000, 8000, 2 * LATENT, wan22.WanVAE),
    WanAutoencoder(SIZES, "wan22_vae_encoder", Role.VAE_ENCODER, 2000, 3300, 2 * LATENT, wan22.WanVAE),
)
