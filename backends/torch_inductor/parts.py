"""A traced network in parts of about the same size, one after the other, so that each can be compiled by itself.

A part is plain data, for another process: its operations by name, and shapes of the tensors that it takes.
"""

from __future__ import annotations

import importlib
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from .graph_passes import KERNELS

aten = torch.ops.aten

Plan = tuple[Sequence[int], Sequence[int]]
"""Inputs and outputs of a part, see ``Part``."""

VIEWS = frozenset(
    (aten.view.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default,
     aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
     aten.split_with_sizes.default, aten._unsafe_view.default, aten.detach.default)
)  # fmt: skip
"""Operations that cost nothing to repeat behind a cut: the tensor that they view crosses it once instead."""

LIBRARY_CALLS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default,
                           aten._scaled_mm.default))  # fmt: skip
"""Operations of one result that are kernels of cuBLAS or cuDNN."""


@dataclass(frozen=True)
class Part:
    """A part of a network.

    Attributes:
        contents: what ``opened`` makes a function of.
        takes: numbers of the values that it takes; the network's inputs have the first numbers, in order.
        gives: numbers of the values that it gives, in order, the network's outputs among them.
    """

    contents: bytes
    takes: tuple[int, ...]
    gives: tuple[int, ...]


class _Name(str):
    """Stands for the node of this name among the arguments of another."""


def in_parts(network: GraphModule, count: int) -> tuple[list[Part], list[int]]:
    """Cut a traced network, in which nothing is written in place, into ``count`` parts.

    Returns:
        The parts, and the numbers of the network's outputs.
    """
    outputs = list(network.graph.output_node().args[0])
    body = [node for node in network.graph.nodes if node.op not in ("placeholder", "output")]
    ends = [_behind_a_library_call(body, len(body) * (i + 1) // count) for i in range(count)]
    where = {node: next(i for i, end in enumerate(ends) if at < end) for at, node in enumerate(body)}
    needs = [_needed({node for node in body if where[node] == part}, where) for part in range(count)]
    numbers = {node: number for number, node in enumerate(network.graph.find_nodes(op="placeholder"))}
    parts = []
    for part, (own, takes) in enumerate(needs):
        wanted = set(outputs).union(*(later for _, later in needs[part + 1 :]))
        gives = [node for node in body if where[node] == part and node in wanted]
        for node in gives:
            numbers[node] = len(numbers)
        parts.append(_part([node for node in body if node in own], takes, gives, numbers))
    return parts, [numbers[node] for node in outputs]


def _behind_a_library_call(body: Sequence[Node], end: int) -> int:
    """The first place from ``end`` on behind what Inductor leaves to a library: there it would fuse nothing anyway."""
    while end < len(body) and body[end - 1].target not in LIBRARY_CALLS:
        end += 1
    return end


def _needed(own: set[Node], where: Mapping[Node, int]) -> tuple[set[Node], set[Node]]:
    """Return what a part computes, earlier views that it repeats among that; and what it takes."""
    computed, takes = set(own), set()
    asked = [given for node in own for given in node.all_input_nodes]
    while asked:
        node = asked.pop()
        if node in computed or node in takes:
            continue
        if node in where and _is_view(node):
            computed.add(node)
            asked += node.all_input_nodes
        else:
            takes.add(node)
    return computed, takes


def _is_view(node: Node) -> bool:
    """Tell whether it costs nothing to repeat, as views and sizes do."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    return node.target in VIEWS or isinstance(node.meta.get("val"), int)


def _part(own: Sequence[Node], takes: set[Node], gives: Sequence[Node], numbers: Mapping[Node, int]) -> Part:
    taken = sorted(takes, key=numbers.__getitem__)
    tensors = [(node.name, node.meta["val"]) for node in taken]
    inputs = [(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device) for name, tensor in tensors]
    calls = []
    for node in own:
        target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target
        calls.append((node.name, target, map_arg((node.args, node.kwargs), lambda given: _Name(given.name))))
    contents = inputs, calls, tuple(_Name(node.name) for node in gives)
    return Part(pickle.dumps(contents), *(tuple(numbers[node] for node in nodes) for nodes in (taken, gives)))


def opened(contents: bytes) -> tuple[GraphModule, list[torch.Tensor]]:
    """Return the function of a part, and fake tensors like its inputs."""
    inputs, calls, gives = pickle.loads(contents)
    graph, examples, made = Graph(), [], {}

    def linked(arguments: Any) -> Any:
        return map_aggregate(arguments, lambda given: made[given] if isinstance(given, _Name) else given)

    with FakeTensorMode():
        for name, shape, strides, dtype, device in inputs:
            examples.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
            made[name] = graph.placeholder(name)
    if any(isinstance(target, str) and target.startswith(f"{KERNELS}.") for _, target, _ in calls):
        importlib.import_module(KERNELS)  # its operations are there from then on
    for name, target, arguments in calls:
        function = operator.attrgetter(target)(torch.ops) if isinstance(target, str) else target
        made[name] = graph.call_function(function, *linked(arguments))
    graph.output(linked(gives))
    return GraphModule({}, graph), examples


class InParts:
    """Compiled parts, called one after the other; each value is let go of when no later part takes it."""

    def __init__(self, parts: Sequence[Callable[..., Sequence[torch.Tensor]]], plans: Sequence[Plan],
                 outputs: Sequence[int]):  # fmt: skip
        """
        Args:
            plans: what each part takes and gives, see ``Part``.
            outputs: numbers of the network's outputs.
        """
        self._steps = []
        kept = set(outputs)
        for part, (takes, gives) in reversed(list(zip(parts, plans, strict=True))):
            self._steps.insert(0, (part, takes, gives, [number for number in takes if number not in kept]))
            kept.update(takes)
        self._outputs = list(outputs)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = dict(enumerate(inputs))
        del inputs
        for part, takes, gives, done in self._steps:
            given = [values[number] for number in takes]
            for number in done:
                del values[number]
            values.update(zip(gives, part(*given), strict=True))
            del given
        return [values[number] for number in self._outputs]
