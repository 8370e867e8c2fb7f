"""Compilation of blocks in tests, and the mark of these tests: torches older than the pinned one cannot do it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hybrid_trt.architectures.blocks import in_blocks
from hybrid_trt.backends.torch_inductor import compile_kinds
from hybrid_trt.backends.torch_inductor.compiled import can_compile, lifted, traced
from hybrid_trt.backends.torch_inductor.free_dimensions import FreeDimensions
from hybrid_trt.backends.torch_inductor.kinds import Kind

COMPILES = pytest.mark.skipif(not can_compile(), reason="this torch is too old to compile to a file")


class Alone(torch.nn.Module):
    """A network of a single block."""

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block
        self.blocks = in_blocks([block])

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.block(*given)


def compiled(block: torch.nn.Module, *calls: Sequence[torch.Tensor]) -> Kind:
    """Compile a block for the first of these calls; sizes in which they differ are free."""
    ((alike,), _) = compile_kinds.kinds_of(Alone(block), calls)
    return compile_kinds.compiled(alike, compile_kinds.BlockFunction(alike.block, alike.calls[0].form), calls[0], None)


def graph_of(function: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Return what a function of exactly these sizes is traced to, its weights first among the inputs."""
    weights = lifted(function)
    return traced(function, list(weights.values()), list(weights), inputs, FreeDimensions([inputs]))[0]
