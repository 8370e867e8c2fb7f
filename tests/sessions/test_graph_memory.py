"""Memory that CUDA graphs keep on a GPU is freed at a run's end, and only where there is such memory.

There is no GPU here: the driver is a double that counts. With a real one: ``test_torch_gpu.py``.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from comfy.patcher_extension import WrapperExecutor
from hybrid_trt.sampling import run_inputs
from hybrid_trt.sessions import graph_memory

GPU = torch.device("cuda", 1)


class Driver:
    """The driver's part of it: GPU 1 has the handle 7 and graphs that keep 96 bytes."""

    def __init__(self) -> None:
        self.kept, self.trimmed, self.synchronized, self.fails = 96, [], 0, ""

    def cuDeviceGet(self, handle: object, index: int) -> int:
        handle._obj.value = {1: 7}[index]
        return 0

    def cuDeviceGetGraphMemAttribute(self, handle: int, attribute: int, value: object) -> int:
        assert (handle, attribute, type(value._obj)) == (7, graph_memory.RESERVED, ctypes.c_uint64)
        value._obj.value = self.kept
        return 100 if self.fails == "asking" else 0

    def cuDeviceGraphMemTrim(self, handle: int) -> int:
        assert self.synchronized, "memory of a replay that still runs is in use"
        self.trimmed.append(handle)
        if self.fails == "giving back":
            return 100
        self.kept = 32
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()

    def synchronize() -> None:
        found.synchronized += 1

    monkeypatch.setattr(graph_memory, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=synchronize))
    graph_memory._handle.cache_clear()
    yield found
    graph_memory._handle.cache_clear()


@pytest.mark.parametrize(("kept", "device", "allocator", "given_back"), [
    (96, GPU, "cudaMallocAsync", 64), (0, GPU, "cudaMallocAsync", 0), (96, torch.device("cpu"), "cudaMallocAsync", 0),
    (96, GPU, "native", 0)], ids=["graphs keep some", "graphs keep none", "a CPU", "another allocator"])  # fmt: skip
def test_what_graphs_keep_is_given_back_once_the_gpu_is_done_and_else_nothing_is_waited_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, kept: int, device: torch.device, allocator: str, given_back: int
) -> None:
    driver.kept = kept
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    assert graph_memory.give_back_graph_memory(device) == given_back
    assert (driver.trimmed, driver.synchronized) == (([7], 1) if given_back else ([], 0))


@pytest.mark.parametrize(("free", "device", "asked"), [(2, GPU, 1), (3, GPU, 0), (2, torch.device("cpu"), 0)])
def test_weights_that_comfyui_brought_meanwhile_give_way_to_graphs(
    monkeypatch: pytest.MonkeyPatch, free: int, device: torch.device, asked: int
) -> None:
    """Doubles of torch's allocator, for which they give way, and of the GPU."""
    made, freed = [], []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 100))
    monkeypatch.setattr(graph_memory.torch, "empty", lambda size, **_: made.append(size))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(made)))
    graph_memory.make_room_for_graphs(3, device)
    assert (made, freed) == ([3] * asked, [1] * asked)


@pytest.mark.parametrize("fails", ["asking", "giving back", "no driver"])
def test_a_driver_that_fails_or_is_not_there_leaves_the_memory_where_it_is(
    driver: Driver, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.fails = fails
    if fails == "no driver":
        monkeypatch.setattr(graph_memory, "_driver", lambda: None)
    assert graph_memory.give_back_graph_memory(GPU) == 0


@pytest.mark.parametrize("ends", ["well", "interrupted"])
def test_a_run_gives_it_back_at_its_end_on_each_gpu_that_it_used(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    given_back = []
    monkeypatch.setattr(run_inputs, "give_back_graph_memory", given_back.append)
    model = SimpleNamespace(get_additional_models_with_key=lambda _key: [], get_model_object=lambda _name: None)
    guider = SimpleNamespace(model_options={}, model_patcher=model)

    def sample() -> str:
        guider.model_options[run_inputs.RUN]._ends[GPU] = torch.cuda.Event
        assert given_back == []
        if ends == "interrupted":
            raise InterruptedError
        return "latent"

    executor = WrapperExecutor.new_class_executor(sample, guider, [run_inputs.sample_on_device])
    if ends == "interrupted":
        with pytest.raises(InterruptedError):
            executor.execute()
        assert given_back == []
    else:
        assert executor.execute() == "latent"
        assert given_back == [GPU]
