"""A traced network in parts of about the same size, one after the other, so that each can be compiled by itself."""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...comfy_model.torch_kernels import best_attention
from ..gpu_lock import GpuLock
from .compiled import Compiled, by_inductor, keep_parts, let_kernels_be_recorded, open_file, traced

log = logging.getLogger(__name__)

@contextmanager
def in_turn(turns: GpuLock) -> Iterator[None]:
    """While the block lasts Inductor times each kernel in a turn of ours.

    All that it times (configurations of Triton's kernels, whether padding a product pays) goes through one function of
    one object. A torch that has another one is left alone: its choices may then be disturbed, its results are not.
    """
    if turns.lock is None:
        yield
        return
    try:
        from torch._inductor.runtime.benchmarking import benchmarker

        measure = benchmarker.benchmark_gpu
    except (ImportError, AttributeError) as error:
        log.warning("Hybrid TRT: this torch times kernels without taking turns (%s)", error)
        yield
        return

    def measure_in_turn(*args: Any, **named: Any) -> Any:
        with turns.taken():
            return measure(*args, **named)

    benchmarker.benchmark_gpu = measure_in_turn
    try:
        yield
    finally:
        del benchmarker.benchmark_gpu  # the class's own is seen again


aten = torch.ops.aten

Plan = tuple[Sequence[int], Sequence[int]]
"""What a part takes and gives, see ``Part``."""

VIEWS = frozenset(
    (aten.view.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default,
     aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
     aten.split_with_sizes.default, aten._unsafe_view.default, aten.detach.default)
)  # fmt: skip
"""What costs nothing to do again behind a cut: the tensor that it looks at crosses in its place, once for all."""

LIBRARY_CALLS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default))
"""Operations of one result that are kernels of cuBLAS or cuDNN."""


@dataclass(frozen=True)
class Part:
    """A part of a network.

    Attributes:
        graph: a function of ``takes``.
        takes: numbers of the values that it takes; the network's inputs have the first numbers, in order.
        gives: numbers of the values that it gives, in order; those of the network's outputs among them.
    """

    graph: GraphModule
    takes: tuple[int, ...]
    gives: tuple[int, ...]

    def examples(self) -> list[torch.Tensor]:
        """Fake tensors like those that it takes."""
        return [node.meta["val"] for node in self.graph.graph.find_nodes(op="placeholder")]


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
        parts.append(_part(network, [node for node in body if node in own], takes, gives, numbers))
    return parts, [numbers[node] for node in outputs]


def _behind_a_library_call(body: Sequence[Node], end: int) -> int:
    """The first place from ``end`` on behind what Inductor leaves to a library: there it would fuse nothing anyway."""
    while end < len(body) and body[end - 1].target not in LIBRARY_CALLS:
        end += 1
    return end


def _needed(own: set[Node], where: Mapping[Node, int]) -> tuple[set[Node], set[Node]]:
    """What a part computes, earlier views that it repeats among that; and what it takes."""
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
    return node.target in VIEWS or (node.target is operator.getitem and _is_view(node.args[0]))


def _part(
    network: GraphModule, own: Sequence[Node], takes: set[Node], gives: Sequence[Node], numbers: Mapping[Node, int]
) -> Part:
    graph, copies = Graph(), {}
    taken = sorted(takes, key=numbers.__getitem__)
    for node in taken:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": node.meta["val"]}
    for node in own:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in gives))
    return Part(GraphModule(network, graph), *(tuple(numbers[node] for node in nodes) for nodes in (taken, gives)))


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


POLL = 0.02
"""Seconds between two looks for a file. Nobody waits in vain: who started the processes ends all when one fails."""


@dataclass(frozen=True)
class SharedSize:
    """A size as the process sees it that compiles part ``part`` of ``count``; the first one has part 0.

    Attributes:
        path: the file for all parts together; what it is made of lies beside it meanwhile.
    """

    path: Path
    part: int
    count: int

    def agreed(self, choice: Any = None) -> Any:
        """What the first process chose, in all of them: it gives its ``choice``, the others wait for it."""
        file = self._beside("choice")
        if self.part == 0:
            _write(file, json.dumps(choice).encode())
            return choice
        return json.loads(_awaited(file))

    def compile(
        self,
        function: torch.nn.Module,
        weights: Sequence[torch.Tensor],
        names: Sequence[str],
        inputs: Sequence[torch.Tensor],
        attention: str | None = None,
        late: Collection[int] = (),
    ) -> Compiled | None:
        """Do this process's part of what ``compile_to_file`` does, whose arguments these are.

        Returns:
            What was compiled, all parts put together; None in all processes but the first.
        """
        let_kernels_be_recorded()
        with torch.inference_mode(False), torch.no_grad(), best_attention(inputs[0].device, attention):
            graph, _ = traced(function, weights, names, inputs, late, functional=True)
            cut, outputs = in_parts(graph, self.count)
            key = hashlib.sha256("\n".join(part.graph.code for part in cut).encode()).hexdigest()
            own = self._compiled(cut[self.part], self.part)
        if self.part:
            _write(self._beside(f"part{self.part}"), pickle.dumps((key, own)))
            return None
        each = [own, *(self._from_another(number, cut[number], key) for number in range(1, self.count))]
        keep_parts(self.path, each, [(part.takes, part.gives) for part in cut], outputs)
        self._beside("choice").unlink(missing_ok=True)
        return open_file(self.path)

    def _from_another(self, number: int, part: Part, key: str) -> bytes:
        file = self._beside(f"part{number}")
        its_key, contents = pickle.loads(_awaited(file))
        file.unlink()
        if its_key == key:
            return contents
        log.warning("part %d is of a network that was traced otherwise: it is compiled again", number + 1)
        with torch.inference_mode(False), torch.no_grad():
            return self._compiled(part, number)

    def _compiled(self, part: Part, number: int) -> bytes:
        file = self._beside(f"inductor{number}")
        by_inductor(part.graph, part.examples()).save(path=str(file))
        contents = file.read_bytes()
        file.unlink()
        return contents

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{what}")


def _write(file: Path, contents: bytes) -> None:
    """Whoever sees the file sees all of it."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(contents)
    os.replace(new, file)


def _awaited(file: Path) -> bytes:
    while not file.exists():
        time.sleep(POLL)
    return file.read_bytes()
