"""How operations are written out for Inductor where its own way is slow on the GPU.

``benchmarks/sweep_flags.py`` measures what it gives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

aten = torch.ops.aten

MOST_SUMMED = 2048
"""Elements of a group that one program of the GPU sums up."""
BY_LINES = 1024
"""From so many pixels on, an image's lines are summed up, channel by channel."""


def group_norm_in_parts(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n: int, c: int, pixels: int, groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``aten.native_group_norm`` by way of the mean and variance of parts of each group, summed up side by side.

    Exact: var(group) = mean(var(part) + (mean(part) - mean(group))^2), all parts being of one size.

    Returns:
        The result, (n, c, height, width) of x's dtype; mean and reciprocal deviation of each group, (n, groups),
        float32.
    """
    # x is no hint at the layout: on a GPU torch hands on a copy in another, which Inductor folds into its readers
    if x.ndim != 4 or part_of(pixels, c // groups) == pixels:
        return NotImplemented
    image = x.permute(0, 2, 3, 1)
    moments = _moments_by_lines if pixels >= BY_LINES else _moments_by_tiles
    middle, variance = moments(image.float(), groups)
    scale = torch.rsqrt(variance + eps)
    by_channel = [t.repeat_interleave(c // groups, 1).view(n, 1, 1, c) for t in (middle, scale)]
    result = (image.float() - by_channel[0]) * by_channel[1]
    if weight is not None:
        result = result * weight.float()
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype).permute(0, 3, 1, 2), middle, scale


def _moments_by_tiles(image: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each group of (n, height, width, c), both (n, groups); a part has some pixels of a group."""
    n, height, width, c = image.shape
    rows = part_of(height * width, c // groups)
    parts = image.reshape(n, height * width // rows, rows, groups, c // groups)
    variance, mean = torch.var_mean(parts, (2, 4), correction=0)  # (n, parts, groups)
    spread, middle = torch.var_mean(mean, 1, correction=0)
    return middle, variance.mean(1) + spread


def _moments_by_lines(image: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; a part is one channel of a line: many programs read all channels of a pixel as they lie in memory."""
    n, height, _, c = image.shape
    variance, mean = torch.var_mean(image, 2, correction=0)  # (n, height, c)
    variance, mean = (t.view(n, height, groups, c // groups) for t in (variance, mean))
    middle = mean.mean((1, 3), keepdim=True)
    return middle.view(n, groups), (variance + (mean - middle).square()).mean((1, 3))


def part_of(pixels: int, wide: int) -> int:
    """The most pixels of ``wide`` channels that one program sums up; they divide all pixels evenly."""
    return max((rows for rows in range(1, pixels + 1) if pixels % rows == 0 and rows * wide <= MOST_SUMMED), default=1)


TABLE: dict[Any, Callable[..., Any]] = {aten.native_group_norm.default: group_norm_in_parts}
"""Operation -> how it is written out; ``NotImplemented`` leaves it to Inductor."""


def keep_channels_last(graph: torch.fx.GraphModule) -> None:
    """Let what is put together from several images' channels lie in memory as convolutions read it, on a GPU.

    Where a norm and a convolution read it, Inductor lays it out for the norm's copy, channel by channel, and each
    kernel that reads or writes it then jumps through memory.
    """
    try:
        from torch._inductor.inductor_prims import force_stride_order
    except ImportError as error:
        log.warning("Hybrid TRT: this torch cannot be told how to lay channels out (%s): networks run slower", error)
        return
    for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default):
        value = node.meta["val"]
        if value.ndim != 4 or value.device.type != "cuda":
            continue
        strides = torch.empty(value.shape, device="meta").to(memory_format=torch.channels_last).stride()
        with graph.graph.inserting_after(node):
            laid_out = graph.graph.call_function(force_stride_order, (node, strides))
        laid_out.meta["val"] = value
        node.replace_all_uses_with(laid_out, delete_user_cb=lambda user, laid_out=laid_out: user is not laid_out)
    graph.recompile()
