"""The order of a block's kernels: each holds no memory before it is needed, and none after."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import COMPILES, compiled
from hybrid_trt.backends.torch_inductor import launch_order


def kernels(reads: dict[str, Sequence[str]]) -> list[Any]:
    """Doubles of Inductor's scheduler nodes, which a GPU's kernels are made of; each by the names of what it reads.

    A result of two kernels that are fused is named after both.
    """
    parts = {part: SimpleNamespace(get_name=lambda part=part: part) for name in reads for part in name.split("+")}

    def node(name: str) -> Any:
        users = [SimpleNamespace(node=parts[other.split("+")[-1]]) for other, needed in reads.items() if name in needed]
        users += [SimpleNamespace(node=SimpleNamespace(get_name=lambda: "the caller"))]
        return SimpleNamespace(
            name=name, get_nodes=lambda: [parts[part] for part in name.split("+")], get_buffer_names=lambda: [name],
            unmet_dependencies=[SimpleNamespace(name=one) for one in (*reads[name], "an input")],
            get_outputs=lambda: [SimpleNamespace(users=users)])  # fmt: skip

    return [node(name) for name in reads]


def ordered(**reads: Sequence[str]) -> list[str]:
    return [kernel.name for kernel in launch_order.as_needed(kernels(reads))]


def test_frames_that_a_later_convolution_needs_are_laid_out_just_before_it() -> None:
    given = {"kept": (), "later": (), "first": ("kept",), "conv": ("first",), "second": ("conv", "later")}
    assert ordered(**given) == ["kept", "first", "conv", "later", "second"]
    fused = {"kept": (), "later": (), "first": ("kept",), "conv+norm": ("first",), "second": ("conv+norm", "later")}
    assert ordered(**fused) == ["kept", "first", "conv+norm", "later", "second"]


def test_what_the_caller_alone_reads_is_copied_as_soon_as_nothing_else_needs_its_source() -> None:
    given = {"frames": (), "padded": ("frames",), "conv": ("padded",), "more": ("conv",), "last": ("frames",)}
    assert ordered(**given) == ["frames", "padded", "last", "conv", "more"]
    alone = {"frames": (), "other": (), "conv": ("other",), "added": ("conv",), "last": ("frames",), "end": ("frames",)}
    assert ordered(**alone) == ["other", "conv", "added", "frames", "last", "end"]


def test_nothing_comes_before_what_it_reads() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        names = [f"k{at}" for at in range(12)]
        given: dict[str, Sequence[str]] = {}
        for at, name in enumerate(names):
            count = int(torch.randint(0, min(at, 3) + 1, (), generator=generator))
            given[name] = [names[int(one)] for one in torch.randperm(at, generator=generator)[:count]]
        order = ordered(**given)
        assert sorted(order) == sorted(names)
        assert all(order.index(one) < order.index(name) for name, needed in given.items() for one in needed)


@COMPILES
def test_inductor_launches_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(launch_order, "as_needed", lambda nodes: (asked.append(len(nodes)), list(nodes))[1])
    compiled(torch.nn.Linear(4, 4), *([torch.randn(size, 4)] for size in (2, 1, 3)))
    assert len(asked) == 1
    assert asked[0] > 0
