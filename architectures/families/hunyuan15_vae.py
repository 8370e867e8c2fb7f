"""The VAE of HunyuanVideo 1.5: convolutions and attention over all latents, then layers that make frames, in chunks.

The first latent frame stands for one frame, each later one for four. A chunk is the frames of one latent frame. Causal
convolutions read two frames of the chunk before, which the chunks hand on. In front of a video its first frame is
repeated. Native computes the same in chunks of two latent frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from comfy.ldm.hunyuan_video.vae_refiner import Decoder, DnSmpl, Encoder, UpSmpl
from comfy.ldm.models.autoencoder import AutoencodingEngine, EmptyRegularizer
from comfy.ldm.modules.diffusionmodules.model import AttnBlock, CarriedConv3d, ResnetBlock

from .. import Role
from ..blocks import in_blocks
from ..calls import Binding
from ..sizes import EACH, LATENT
from ..vae_sizes import SIZES, VideoVAESizes, bind_images
from .autoencoder import attention, with_edges
from .wan_vae import KEPT, Kept, bind_pixels, last_frames

PIXELS = 2 * LATENT
TIMES = [False, False, True, True]
"""True for those of the encoder's layers that halve frames as well as sides; the decoder's are the other way round."""

FILE_MARKS = ()
"""No file of a diffusion model is known by its VAE."""


@dataclass(frozen=True)
class HunyuanVideoVAE(VideoVAESizes):
    """Decoder or encoder of a still or video, to or from pixels from -1 to 1."""

    pixels = PIXELS
    only_live = "frames that are computed from frames before them"

    def matches(self, module: torch.nn.Module) -> bool:
        if type(module) is not AutoencodingEngine or type(module.regularization) is not EmptyRegularizer:
            return False
        half, decodes = self._half(module), self.decodes
        if type(half) is not (Decoder if decodes else Encoder) or not half.refiner_vae:
            return False
        times = [layer.tus if decodes else layer.tds for layer in _layers_of(half, UpSmpl, DnSmpl)]
        return times == (TIMES[::-1] if decodes else TIMES)

    def _half(self, module: AutoencodingEngine) -> torch.nn.Module:
        return module.decoder if self.decodes else module.encoder

    def channels(self, module: AutoencodingEngine) -> int:
        return self._half(module).z_channels

    def binding(self, module: AutoencodingEngine) -> Binding:
        return bind_images if self.decodes else bind_pixels

    def function(self, module: AutoencodingEngine) -> torch.nn.Module:
        return (_Decoder if self.decodes else _Encoder)(module)


def _layers_of(half: torch.nn.Module, *kinds: type) -> list[torch.nn.Module]:
    return [layer for layer in half.modules() if type(layer) in kinds]


class _Half(torch.nn.Module):
    """One half of a VAE: blocks that take all frames, and blocks that take them in chunks."""

    def __init__(self, vae: torch.nn.Module, half: torch.nn.Module, stages: torch.nn.Module):
        super().__init__()
        self.vae = vae
        self.mid = _layers_of(half.mid, *_COMPUTED)
        self.stages = _layers_of(stages, *_COMPUTED)
        self.last = torch.nn.ModuleList([half.norm_out, half.conv_out])
        layers = (*self.mid, *self.stages)
        self.blocks = tuple(block for one in layers for block in in_blocks([one], _COMPUTED[type(one)]))

    def _whole(self, steps: Sequence[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x, _ = step(x, (), None)
        return x

    def _in_chunks(self, steps: Sequence[torch.nn.Module], x: torch.Tensor, length: int, gives: int) -> torch.Tensor:
        """Compute steps on one frame, then on ``length`` at a time, each of which makes ``gives`` frames."""
        count = 1 + (x.shape[2] - 1) // length
        kept: list[Kept] = [()] * len(steps)
        result = x
        for number in range(count):
            start, place = 1 + length * (number - 1), 1 + gives * (number - 1)
            h = x[:, :, max(0, start) : start + length]
            for index, step in enumerate(steps):
                h, made = step(h, kept[index], h.shape[2])
                kept[index] = made if number < count - 1 else ()
            if number == 0:
                result = h.new_empty(*h.shape[:2], 1 + gives * (count - 1), *h.shape[3:])
            result[:, :, max(0, place) : place + gives] = h
        return result


class _Decoder(_Half):
    def __init__(self, vae: AutoencodingEngine):
        half, vae.encoder = vae.decoder, torch.nn.Identity()
        super().__init__(vae, half, half.up)
        self.blocks += (*in_blocks([half.conv_in], _entered), *in_blocks([self.last], _ended))

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor]:
        x = self._whole([self.vae.decoder.conv_in, *self.mid], latents)
        return (self._in_chunks([*self.stages, self.last], x, 1, EACH),)


class _Encoder(_Half):
    def __init__(self, vae: AutoencodingEngine):
        half, vae.decoder = vae.encoder, torch.nn.Identity()
        super().__init__(vae, half, half.down)
        self.blocks += (*in_blocks([half.conv_in], _convolved), *in_blocks([self.last], _means))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        x = self._in_chunks([self.vae.encoder.conv_in, *self.stages], pixels, EACH, 1)
        return (self._whole([*self.mid, self.last], x),)


def _convolved(conv: CarriedConv3d, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    """Convolve frames with those before them; return the result, and what the next chunk reads."""
    if not kept:
        return conv.conv(with_edges(x, KEPT)), (() if frames is None else (x.expand(-1, -1, KEPT, -1, -1),))
    joined = torch.cat([*kept, x], 2)
    return conv.conv(with_edges(joined, 0)), (last_frames(joined, KEPT),)


def _entered(conv: CarriedConv3d, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    found, more = _convolved(conv, x, kept, frames)
    return found + x.repeat_interleave(found.shape[1] // x.shape[1], 1), more


def _ended(layers: torch.nn.ModuleList, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    norm, conv = layers
    return _convolved(conv, F.silu(norm(x)), kept, frames)


def _means(layers: torch.nn.ModuleList, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    """Return the means of the latent; deviations are not used."""
    found, more = _ended(layers, x, kept, frames)
    return (found + x.unflatten(1, (found.shape[1], -1)).mean(2)).chunk(2, 1)[0], more


def _residual(block: ResnetBlock, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    h, one = _convolved(block.conv1, F.silu(block.norm1(x)), kept[:1], frames)
    h, two = _convolved(block.conv2, F.silu(block.norm2(h)), kept[1:], frames)
    return h + (x if block.in_channels == block.out_channels else block.nin_shortcut(x)), one + two


def _attended(block: AttnBlock, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    """Attend to all elements of all frames."""
    h = block.norm(x)
    return x + block.proj_out(attention(block.q(h), block.k(h), block.v(h))), ()


def _enlarged(layer: UpSmpl, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    """Unfold channels into sides, and behind the first chunk into frames too where the layer does."""
    h, more = _convolved(layer.conv, x, kept, frames)
    if layer.tus and not kept:  # half of the channels have no place
        h = h.unflatten(1, (4, 2, -1))[:, :, 0].flatten(1, 2)
    h = h + x.repeat_interleave(h.shape[1] // x.shape[1], 1)
    h = h.unflatten(1, (2 if layer.tus and kept else 1, 2, 2, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return h.flatten(2, 3).flatten(3, 4).flatten(4, 5), more


def _reduced(layer: DnSmpl, x: torch.Tensor, kept: Kept, frames: int | None) -> tuple[torch.Tensor, Kept]:
    """Fold sides into channels, and behind the first chunk frames too where the layer does."""
    h, more = _convolved(layer.conv, x, kept, frames)
    times = 2 if layer.tds and kept else 1
    h, x = (_folded(t, times) for t in (h, x))
    if layer.tds and not kept:
        h = torch.cat([h, h], 1)
    return h + x.unflatten(1, (h.shape[1], -1)).mean(2), more


def _folded(x: torch.Tensor, times: int) -> torch.Tensor:
    parts = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, times))
    return parts.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)


_COMPUTED = {ResnetBlock: _residual, AttnBlock: _attended, UpSmpl: _enlarged, DnSmpl: _reduced}
_MODEL, _REFINER = "comfy.ldm.modules.diffusionmodules.model", "comfy.ldm.hunyuan_video.vae_refiner"
NEEDS = (
    f"{_REFINER}:Decoder.forward(self, z)",
    f"{_REFINER}:DnSmpl.forward(self, x, conv_carry_in, conv_carry_out)",
    f"{_REFINER}:Encoder.forward(self, x)",
    f"{_REFINER}:UpSmpl.forward(self, x, conv_carry_in, conv_carry_out)",
    "comfy.ldm.models.autoencoder:AutoencodingEngine",
    "comfy.ldm.models.autoencoder:EmptyRegularizer",
    f"{_MODEL}:AttnBlock",
    f"{_MODEL}:CarriedConv3d",
    f"{_MODEL}:ResnetBlock.forward(self, x, temb, conv_carry_in, conv_carry_out)",
)

ARCHITECTURES = (
    HunyuanVideoVAE(SIZES, "hunyuan15_vae_decoder", Role.VAE_DECODER),
    HunyuanVideoVAE(SIZES, "hunyuan15_vae_encoder", Role.VAE_ENCODER),
)
