"""How operations are written out for Inductor where its own way is slow on the GPU.

``benchmarks/sweep_flags.py`` measures what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

MOST_SUMMED = 2048
"""Elements of a group that one program of the GPU sums up."""
SPLIT_WELL = 4096
"""From so many pixels on, Inductor splits a group's sum by itself."""


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
    # x is no hint at the layout: on a GPU torch hands on a copy in another, which Inductor folds into its readers
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


TABLE: dict[Any, Callable[..., Any]] = {aten.native_group_norm.default: group_norm_in_parts}
"""Operation -> how it is written out; ``NotImplemented`` leaves it to Inductor."""
