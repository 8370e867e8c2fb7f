"""How operations are written out for Inductor where its own way is slow on the GPU: by how pixels lie in memory.

Images are channels_last, so what lies together is a pixel's channels. ``benchmarks/sweep_flags.py`` measures each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

MOST_SUMMED = 2048
"""Elements of a group that one program of the GPU sums up."""
SPLIT_WELL = 4096
"""From so many pixels on, Inductor splits a group's sum by itself."""


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether an image's pixels lie one after another."""
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)


def cat_of_pixels(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """``aten.cat`` of images' channels, pixel by pixel: else Inductor writes the result channel by channel."""
    if dim not in (1, -3) or not all(is_channels_last(x) for x in tensors):
        return NotImplemented
    return torch.cat([x.permute(0, 2, 3, 1) for x in tensors], 3).permute(0, 3, 1, 2)


def group_norm_in_parts(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n: int, c: int, pixels: int, groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``aten.native_group_norm`` by way of the mean and variance of parts of each group, summed up side by side.

    Exact: var(group) = mean(var(parts)) + var(means of the parts), all parts being of one size.

    Returns:
        The result, (n, c, height, width) of x's dtype; mean and reciprocal deviation of each group, (n, groups),
        float32.
    """
    wide = c // groups
    rows = part_of(pixels, wide)
    # x itself is no hint at the layout: on a GPU torch hands on a copy in another, which Inductor never makes
    if x.ndim != 4 or rows == pixels or pixels >= SPLIT_WELL:
        return NotImplemented
    image = x.permute(0, 2, 3, 1)
    parts = image.reshape(n, pixels // rows, rows, groups, wide).float()
    variance, mean = torch.var_mean(parts, (2, 4), correction=0)  # (n, parts, groups)
    spread, middle = torch.var_mean(mean, 1, correction=0)  # (n, groups)
    scale = torch.rsqrt(variance.mean(1) + spread + eps)
    by_channel = [t.repeat_interleave(wide, 1).view(n, 1, 1, c) for t in (middle, scale)]
    result = (image.float() - by_channel[0]) * by_channel[1]
    if weight is not None:
        result = result * weight.float()
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype).permute(0, 3, 1, 2), middle, scale


def part_of(pixels: int, wide: int) -> int:
    """The most pixels of ``wide`` channels that one program sums up; they divide all pixels evenly."""
    return max((rows for rows in range(1, pixels + 1) if pixels % rows == 0 and rows * wide <= MOST_SUMMED), default=1)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.cat.default: cat_of_pixels,
    aten.native_group_norm.default: group_norm_in_parts,
}
"""Operation -> how it is written out; ``NotImplemented`` leaves it to Inductor."""
