"""Zeros for inputs that are absent: all of them share the memory of the largest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ..architectures.shapes import Shape, TensorSpec
from ..comfy_model.torch_kernels import strides_of


def _contiguous(shape: Shape) -> tuple[int, ...]:
    return strides_of(shape, torch.contiguous_format)


class Zeros:
    """Zeros of any shape on a device, which nobody writes to. Memory is taken once for each dtype."""

    def __init__(self, device: torch.device, strides: Callable[[Shape], tuple[int, ...]] = _contiguous):
        """
        Args:
            strides: gives the layout for a shape.
        """
        self._device = device
        self._strides = strides
        self._memory: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[Shape, str], torch.Tensor] = {}

    def of(self, absent: Sequence[TensorSpec], symbols: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return zeros for these inputs in a call of these sizes, by name."""
        wanted = [(spec.shape(symbols), spec.dtype) for spec in absent]
        new = {one for one in wanted if one not in self._views}
        for shape, dtype in sorted(new, key=lambda one: math.prod(one[0]), reverse=True):  # the largest makes room
            size, memory = math.prod(shape), self._memory.get(dtype)
            if memory is None or memory.numel() < size:
                memory = self._memory[dtype] = torch.zeros(size, dtype=getattr(torch, dtype), device=self._device)
            self._views[shape, dtype] = memory.as_strided(shape, self._strides(shape))
        return {spec.name: self._views[one] for spec, one in zip(absent, wanted, strict=True)}

    def clear(self) -> None:
        """Give the memory back, as soon as nobody else holds it."""
        self._memory.clear()
        self._views.clear()
