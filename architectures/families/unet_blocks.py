"""Blocks of UNets and ControlNets of Stable Diffusion: the layers that are compiled once for each kind.

Between the blocks native's own forward runs: it embeds the timestep, adds residuals and joins skips.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Upsample

from ..blocks import in_blocks
from ..shapes import Range

FREE: Mapping[str, Range] = {
    "B": Range(1, 2, 64), "H": Range(1, 72, 1 << 10), "W": Range(1, 88, 1 << 10), "T": Range(1, 130, 1 << 14),
    "HB": Range(1, 2, 64)}  # fmt: skip
"""The sizes that compiled blocks serve; see ``Architecture``. Hints are no input of a block."""


def blocks_of(network: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the blocks of a copy of a UNet or ControlNet. Its layers call them from now on."""
    stacks = chain.from_iterable(getattr(network, name, None) or () for name in ("input_blocks", "output_blocks"))
    middle = (getattr(network, name, None) or () for name in ("middle_block", "middle_block_out"))
    ends = (getattr(network, name, None) for name in ("time_embed", "label_emb", "out"))
    layers = chain(*stacks, *middle, *getattr(network, "zero_convs", ()), filter(None, ends))
    return tuple(block for layer in layers for block in _blocks(layer))


def _blocks(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the blocks of a layer: itself, or parts that it calls instead of its own forward."""
    if isinstance(layer, SpatialTransformer) and len(layer.transformer_blocks) > 1:
        layer.entrance = torch.nn.Sequential(layer.norm, layer.proj_in)
        layer.exit = torch.nn.Sequential(layer.proj_out)
        layer.forward = partial(_transformed, layer)
        yield from in_blocks([layer.entrance], _to_tokens)
        yield from in_blocks(layer.transformer_blocks)
        yield from in_blocks([layer.exit], _to_image)
    elif isinstance(layer, Upsample) and layer.use_conv:
        layer.enlarged = torch.nn.Sequential(layer.conv)
        layer.forward = partial(_upsampled, layer)
        yield from in_blocks([layer.enlarged], _enlarged)
    elif list(layer.parameters()):
        yield from in_blocks([layer])


def _transformed(
    layer: SpatialTransformer, x: torch.Tensor, context: torch.Tensor, transformer_options: dict
) -> torch.Tensor:
    """Compute native's transformer of several blocks."""
    h = layer.entrance(x)
    for block in layer.transformer_blocks:
        h = block(h, context=context, transformer_options=transformer_options)
    return layer.exit(h, x)


def _to_tokens(layers: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """(batch, channels, height, width) -> (batch, tokens, features)."""
    norm, project = layers
    if isinstance(project, torch.nn.Conv2d):
        return project(norm(x)).movedim(1, 3).flatten(1, 2)
    return project(norm(x).movedim(1, 3).flatten(1, 2))


def _to_image(layers: torch.nn.Sequential, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of an image and its tokens, which are (batch, tokens, features)."""
    (project,), sides = layers, x.shape[2:]
    if isinstance(project, torch.nn.Conv2d):
        return x + project(h.unflatten(1, sides).movedim(3, 1))
    return x + project(h).unflatten(1, sides).movedim(3, 1)


def _upsampled(layer: Upsample, x: torch.Tensor, output_shape: Sequence[int] | None = None) -> torch.Tensor:
    """Compute native's layer. Exporters see native's own operation."""
    if torch.onnx.is_in_onnx_export():
        return Upsample.forward(layer, x, output_shape)
    height, width = (2 * side for side in x.shape[2:]) if output_shape is None else output_shape[2:]
    return layer.enlarged(x, x.new_empty(1, 0, height, width))


def _enlarged(layers: torch.nn.Sequential, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Enlarge an image, then compute the convolution.

    Args:
        like: without elements; its sides are those of the result.
    """
    return layers[0](F.interpolate(x, size=like.shape[2:], mode="nearest"))
