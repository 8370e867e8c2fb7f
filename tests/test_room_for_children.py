"""The number of sizes compiled at once: as many as cores, main memory and the GPU have room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pack import import_comfy

import_comfy()

from hybrid_trt.architectures.shapes import Dim, TensorSpec
from hybrid_trt.engine_builder import resources

X = TensorSpec("x", "float16", (Dim("B"), 4, Dim("H"), Dim("W")))


@pytest.fixture
def large_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with room for many; what it has may be taken from it."""
    machine = SimpleNamespace(cores=64, main=1e12, gpu=1e12)
    (tmp_path / "weights").write_bytes(b"")
    monkeypatch.setattr(resources, "processors", lambda: machine.cores)
    monkeypatch.setattr(resources, "available_bytes", lambda: int(machine.main))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _gpu: (int(machine.gpu), int(2 * machine.gpu)))
    machine.task = {
        "weights_file": str(tmp_path / "weights"), "backend": "torch", "device": "cuda", "gpu": 0,
        "inputs": [X.to_json()], "outputs": [X.to_json()], "compiled": [{"B": 1, "H": 64, "W": 64}],
    }  # fmt: skip
    return machine


def test_children_are_as_many_as_each_resource_has_room_for(large_machine: SimpleNamespace) -> None:
    def count(**less: float) -> int:
        machine = SimpleNamespace(**vars(large_machine))
        vars(large_machine).update(less)
        try:
            return resources.children_with_room(large_machine.task)
        finally:
            vars(large_machine).update(vars(machine))

    assert count() == 32
    assert [count(cores=cores) for cores in (1, 3, 4, 7)] == [0, 1, 2, 3]
    assert [count(main=main) for main in (4.9e9, 5e9, 7e9)] == [1, 2, 3]
    assert [count(gpu=gpu) for gpu in (3e9, 3.8e9, 5e9, 6.2e9)] == [0, 1, 2, 3]


def test_who_does_a_part_of_a_size_needs_no_room_for_the_network(large_machine: SimpleNamespace) -> None:
    machine, task, one = large_machine, large_machine.task, large_machine.task["compiled"]
    with Path(task["weights_file"]).open("r+b") as file:
        file.truncate(4 * 10**9)  # takes no disk
    # 6.5 GB on the GPU for each size, 0.8 for each further part
    machine.gpu = 1.5 * (6.5e9 + 3 * 0.8e9)
    assert resources.children_with_room(task) == 4
    assert resources.children_with_room({**task, "compiled": one * 2}) == 1
    machine.gpu = 1.5 * (2 * 6.5e9 + 2 * 0.8e9)
    assert resources.children_with_room({**task, "compiled": one * 2}) == 4
    # and 6.6 and 2 GB of main memory
    machine.gpu, machine.main = 1e12, 6.6e9 + 2 * 2e9 + 1e6
    assert resources.children_with_room(task) == 3
    assert resources.children_with_room({**task, "compiled": one * 2}) == 1


def test_larger_weights_and_sizes_need_more_of_the_gpu(large_machine: SimpleNamespace) -> None:
    task, needed = large_machine.task, resources.needed_on_gpu
    assert needed(task, 5 * 10**9) == needed(task, 0) + 5 * 10**9
    large = {**task, "compiled": [*task["compiled"], {"B": 16, "H": 512, "W": 512}]}
    assert needed(large, 0) > needed(task, 0)


def test_a_gpu_that_tells_nothing_has_room_for_one(
    large_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_gpu: int) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert resources.children_with_room(large_machine.task) == 1
    assert resources.children_with_room({**large_machine.task, "device": "cpu"}) == 32


def test_a_container_has_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    every = resources.processors()
    assert every >= 1
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert resources.processors() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert resources.processors() == every
