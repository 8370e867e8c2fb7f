"""Replays CUDA graphs and gives their memory back in between, in a process of its own: prints the allocator, how many
MiB that were and how many were left, and whether replays compute the same afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

from pack import import_comfy

import_comfy()

import torch
from hybrid_trt.sessions import graph_memory
from hybrid_trt.sessions.cuda_graphs import GraphCache

GPU = torch.device("cuda", 0)


def grows(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Takes 256 MiB on the way."""
    return {"out": tensors["x"].repeat(1 << 14, 1).cumsum(0).sum(0)}


graphs, equal, given_back = GraphCache(GPU), True, []
with torch.inference_mode():
    for i in range(9):
        x = torch.randn(1, 2048, device=GPU)
        equal &= torch.equal(graphs.run(grows, {"x": x})["out"], grows({"x": x})["out"])
        torch.cuda.empty_cache()
        if i % 3 == 2:
            given_back.append(graph_memory.give_back_graph_memory(GPU))
assert graphs.failure is None
assert len(graphs) == 1
print(torch.cuda.get_allocator_backend(), min(given_back) >> 20, graph_memory.graph_memory(GPU) >> 20, equal)
