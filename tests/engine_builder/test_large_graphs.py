"""Graphs above the 2 GB at which protobuf ends are exported and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hybrid_trt.architectures.shapes import Dim, TensorSpec
from hybrid_trt.engine_builder.worker import parity
from hybrid_trt.engine_builder.worker.onnx_export import DATA_NAME, export_onnx

WIDTH, LAYERS, FILLED = 10_000, 11, 64


def wide_layers(data: Path) -> tuple[torch.nn.Module, dict[torch.nn.Parameter, int]]:
    """2.2 GB of linear layers in half precision, all zero but for a corner, in a file with holes that takes no disk."""
    size = WIDTH * WIDTH * 2
    generator = torch.Generator().manual_seed(1)
    with data.open("wb") as file:
        file.truncate(LAYERS * size)
        for layer in range(LAYERS):
            corner = (torch.randn(FILLED, FILLED, generator=generator) / FILLED**0.5).half()
            for i, row in enumerate(corner):
                file.seek(layer * size + i * WIDTH * 2)
                file.write(row.numpy().tobytes())
    values = torch.from_file(str(data), shared=False, size=LAYERS * WIDTH * WIDTH, dtype=torch.float16)
    function = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(LAYERS)))
    offsets = {}
    for i, layer in enumerate(function):
        layer.weight = torch.nn.Parameter(values[i * WIDTH * WIDTH : (i + 1) * WIDTH * WIDTH].view(WIDTH, WIDTH), False)
        offsets[layer.weight] = i * size
    return function, offsets


class AsTuple(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(x),)


@pytest.mark.slow
def test_a_graph_above_two_gigabytes_is_exported_and_checked(tmp_path: Path) -> None:
    inner, offsets = wide_layers(tmp_path / DATA_NAME)
    function = AsTuple(inner)
    inputs, outputs = ([TensorSpec(name, "float16", (Dim("B"), WIDTH))] for name in ("x", "out"))
    graph = export_onnx(function, inputs, outputs, {"B": 2}, tmp_path, offsets)
    assert graph.stat().st_size < 100_000
    assert (tmp_path / DATA_NAME).stat().st_size > 2 << 30
    mapping = json.loads((tmp_path / "parameters.json").read_text())
    assert set(mapping) == {name for name, _ in function.named_parameters()}

    cases = parity.reference_cases(function, inputs, [{"B": 3}])
    assert cases[0].expected[0][:, :FILLED].abs().mean() > 0.1
    record = parity.check_parity(graph, cases, outputs, "float16")
    assert 0 < record["rel_err"] <= 5e-3
