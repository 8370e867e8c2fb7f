"""Additions in place are taken out of a traced network, where its results stay the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hybrid_trt.backends.torch_inductor.additions_in_place import is_write, take_out_writes
from torch.fx.experimental.proxy_tensor import make_fx

Network = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Written to two times, read in between and behind, whole and in part."""
    total = torch.relu(x).view(2, -1)
    before = total.sum(1, keepdim=True)
    total += y
    middle = total[:, 1:].sum(1, keepdim=True)
    total += before * 2
    return total * middle + total[:, :1]


def by_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.relu(x)
    row = total[0]
    row += y[0]
    return total


def seen_in_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.relu(x)
    row = total[0]
    total += y
    return row * 2


def of_another_type(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.relu(x).half()
    total += y
    return total


def its_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += y
    return x * 2


def in_another_way(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.relu(x)
    total *= y
    return total


def test_what_is_read_behind_an_addition_in_place_is_its_result() -> None:
    given = torch.randn(2, 6), torch.randn(2, 6)
    graph = make_fx(twice, tracing_mode="fake")(*given)
    assert writes(graph) == 2
    take_out_writes(graph)
    assert writes(graph) == 0
    assert torch.equal(graph(*given), twice(*given))


@pytest.mark.parametrize("network", [by_a_view, seen_in_a_view, of_another_type, its_input, in_another_way])
def test_other_writes_and_those_that_are_read_through_another_tensor_are_refused(network: Network) -> None:
    graph = make_fx(network, tracing_mode="fake")(torch.randn(2, 6), torch.randn(2, 6))
    assert writes(graph) == 1
    with pytest.raises(ValueError, match="writes in place"):
        take_out_writes(graph)


def writes(graph: torch.fx.GraphModule) -> int:
    return sum(map(is_write, graph.graph.nodes))
