"""A network that is compiled in parts computes what it does as a whole, whoever compiles which part."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compiling import COMPILES
from pack import import_comfy

import_comfy()

from hybrid_trt.architectures import architecture_of
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends.torch_inductor import compiled, opened_files, parts
from hybrid_trt.engine_library.engine import relative_error
from small_networks import network as network_of

SIZES = {"B": 2, "H": 8, "W": 8, "T": 77, "HB": 1}


class Small:
    """A small network as a function of its inputs, and as a graph in which nothing is written in place."""

    def __init__(self, kind: str):
        module = network_of(kind, "unlike_levels").module
        architecture = architecture_of(module)
        specs = architecture.engine_inputs(module, "float32")
        architecture.passes(module)  # which takes what runs before out of the network
        architecture.fuse_layers(module)
        self.function = architecture.function(module).eval().requires_grad_(False)
        names = sorted(name for name, _ in self.function.named_parameters())
        self.weights = [self.function.get_parameter(name).data for name in names]
        self.inputs = list(sample_inputs(specs, SIZES, seed=3).values())
        self.late = [i for i, spec in enumerate(specs) if spec.late]
        self.arguments = (self.function, self.weights, names, self.inputs)
        self.graph, _ = compiled.traced(*self.arguments, self.late, functional=True)
        with torch.inference_mode():
            self.expected = self.function(*self.inputs)

    def assert_like_it(self, results: list[torch.Tensor]) -> None:
        for result, expected in zip(results, self.expected, strict=True):
            assert relative_error(result, expected) <= 1e-5


@pytest.fixture(scope="module", params=["unet", "controlnet"])
def small(request: pytest.FixtureRequest) -> Small:
    return Small(request.param)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_one_after_the_other_compute_what_the_whole_does(small: Small, count: int) -> None:
    cut, outputs = parts.in_parts(small.graph, count)
    assert len(cut) == count
    graphs = [parts.opened(part.contents)[0] for part in cut]
    sizes = [len(graph.graph.nodes) - len(part.takes) for graph, part in zip(graphs, cut, strict=True)]
    assert max(sizes) < 2 * len(small.graph.graph.nodes) / count
    together = parts.InParts(graphs, [(part.takes, part.gives) for part in cut], outputs)
    with torch.inference_mode():
        small.assert_like_it(together(*small.weights, *small.inputs))


def test_what_crosses_a_cut_crosses_once_and_is_no_view(small: Small) -> None:
    cut, _ = parts.in_parts(small.graph, 3)
    inputs = len(small.weights) + len(small.inputs)
    for part in cut[1:]:
        taken = parts.opened(part.contents)[0].graph.find_nodes(op="placeholder")
        crossing = [node for node, number in zip(taken, part.takes, strict=True) if number >= inputs]
        assert crossing
        made = {node.name: node for node in small.graph.graph.nodes}
        assert not [node.name for node in crossing if made[node.name].target in parts.VIEWS]
        assert len(set(part.takes)) == len(part.takes)
        assert len({node.name for node in crossing}) == len(crossing)


def test_a_cut_is_where_inductor_fuses_nothing(small: Small) -> None:
    cut, _ = parts.in_parts(small.graph, 3)
    for part in cut[:-1]:
        *_, last, _ = parts.opened(part.contents)[0].graph.nodes
        assert last.target in parts.LIBRARY_CALLS


def test_a_value_is_let_go_of_when_no_later_part_takes_it() -> None:
    held: list[weakref.ref] = []

    def first(a: torch.Tensor) -> list[torch.Tensor]:
        made = [a + 1, a + 2]
        held.extend(weakref.ref(tensor) for tensor in made)
        return made

    def second(once: torch.Tensor, twice: torch.Tensor) -> list[torch.Tensor]:
        return [once + twice]

    def third(twice: torch.Tensor, summed: torch.Tensor) -> list[torch.Tensor]:
        assert held[0]() is None, "the second part was the last that took it"
        assert held[1]() is twice
        return [twice * summed]

    network = parts.InParts([first, second, third], [([0], [1, 2]), ([1, 2], [3]), ([2, 3], [4])], [4, 0])
    a = torch.ones(3)
    result, given = network(a)
    assert result.tolist() == [15.0] * 3
    assert given is a


class Plain(torch.nn.Module):
    """A network that is compiled in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return (x,)


@COMPILES
def test_parts_that_others_compile_are_put_together_in_a_file(tmp_path: Path) -> None:
    network, x, path = Plain().requires_grad_(False), torch.randn(5, 8), tmp_path / "sizes.bin"
    names = sorted(name for name, _ in network.named_parameters())
    weights = [network.get_parameter(name) for name in names]
    with ThreadPoolExecutor(1) as other:
        compiled.compile_in_parts(other.submit, 2, network, weights, names, [x], path)()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    made = opened_files.open_file(path)
    assert isinstance(made, parts.InParts)
    with torch.inference_mode():
        assert torch.allclose(made(*weights, x)[0], network(x)[0], atol=1e-6)
