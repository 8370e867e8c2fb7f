"""Results of a call beside each other in memory, one block for each dtype: a single copy hands all of a block out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Views = dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
"""Result name -> its dtype, shape, strides and offset in its block."""
Blocks = dict[torch.dtype, torch.Tensor]

ALIGNED = 64
"""Elements: each result begins at a multiple."""


def views_of(results: Mapping[str, torch.Tensor]) -> Views:
    """Give each result of a call its place."""
    sizes: dict[torch.dtype, int] = {}
    views: Views = {}
    for name, result in results.items():
        # the result's own strides if it has no gaps, else strides of a contiguous tensor
        strides = torch.empty_like(result, device="meta", memory_format=torch.preserve_format).stride()
        place = sizes.get(result.dtype, 0)
        views[name] = (result.dtype, result.shape, strides, place)
        sizes[result.dtype] = place + -(-result.numel() // ALIGNED) * ALIGNED
    return views


def blocks_for(views: Views, device: torch.device) -> Blocks:
    """Allocate the blocks."""
    sizes: dict[torch.dtype, int] = {}
    for dtype, shape, _, place in views.values():
        sizes[dtype] = max(sizes.get(dtype, 0), place + math.prod(shape))
    return {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}


def in_blocks(views: Views, blocks: Blocks) -> dict[str, torch.Tensor]:
    """Return the results as parts of their blocks."""
    return {
        name: blocks[dtype].as_strided(shape, strides, offset)
        for name, (dtype, shape, strides, offset) in views.items()
    }
