"""Random inputs as sampling has them, to trace, compare and compile networks with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .shapes import Shape, TensorSpec

Draw = Callable[[Shape, torch.Generator], torch.Tensor]

SAMPLES: dict[str, Draw] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "unit": lambda shape, generator: torch.rand(shape, generator=generator),
    "timestep": lambda shape, generator: torch.rand(shape, generator=generator) * 999,
}
"""``TensorSpec.sample`` -> values: standard normal, 0 to 1, 0 to 999."""


def sample_inputs(specs: Sequence[TensorSpec], symbols: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    """Random tensors by name, on the CPU in the specs' dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: SAMPLES[spec.sample](spec.shape(symbols), generator).to(getattr(torch, spec.dtype))
        for spec in specs
    }
