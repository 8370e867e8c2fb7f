"""A session of engine files: captured calls give the numbers of plain ones, a runner to each graph; zeros of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_engine
import pytest
import torch
from fake_recorder import Recorder
from hybrid_trt.architectures.shapes import Dim, TensorSpec
from hybrid_trt.comfy_model.torch_kernels import strides_of
from hybrid_trt.engine_library import Library, Reason, Unavailable
from hybrid_trt.sessions.cuda_graphs import GraphCache
from hybrid_trt.sessions.file_session import FileSession
from hybrid_trt.sessions.made_inputs import Zeros

CPU = torch.device("cpu")


class CapturableRunner:
    """Stands for TensorRT's: it doubles what it is given, and remembers of which shapes it was asked last."""

    device, bytes, capturable = CPU, 1000, True

    def __init__(self, made: list[CapturableRunner]):
        self.shapes: list[tuple[int, ...]] = []
        self._made = made
        made.append(self)

    def new_context(self) -> CapturableRunner:
        return CapturableRunner(self._made)

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        (given,) = inputs.values()
        self.shapes.append(tuple(given.shape))
        for name in outputs:
            torch.mul(given, 2, out=outputs[name])


def session(folder: Path) -> tuple[FileSession, list[CapturableRunner]]:
    fake_engine.publish(folder, b"engine", largest=8)
    (engine,) = Library([folder]).engines()
    made: list[Any] = []
    return FileSession(engine, lambda *_: CapturableRunner(made), CPU, recorder=Recorder()), made


def test_each_graph_has_a_runner_of_its_own_that_never_meets_other_shapes(tmp_path: Path) -> None:
    opened, made = session(tmp_path)
    for batch in (1, 2, 3, 1, 2, 3, 3, 1, 2):
        x = torch.randn(batch, 4)
        assert torch.equal(opened.run({"x": x})["x"], x * 2)
    assert len(opened.graphs) == 3
    plain, *captured = made
    assert plain.shapes == [(1, 4), (2, 4), (3, 4)]
    assert [set(runner.shapes) for runner in captured] == [{(1, 4)}, {(2, 4)}, {(3, 4)}]


def test_a_network_warms_the_stream_up_once_and_one_with_a_state_for_each_graph() -> None:
    """A run of a video takes seconds."""
    ran: list[tuple[int, ...]] = []

    def network(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        ran.append(tuple(inputs["x"].shape))
        return {"out": inputs["x"] + 1}

    recorder = Recorder()
    recorder.warm_up = lambda body: body()
    for own, runs in (None, [3, 2, 2]), (lambda: network, [3, 3, 3]):
        cache, counts = GraphCache(CPU, capture=recorder), []
        for size in (2, 3, 4):
            ran.clear()
            for number in range(2):
                x = torch.randn(size)
                replays = recorder.replayed
                assert torch.equal(cache.run(network, {"x": x}, own=own)["out"], x + 1)
                assert recorder.replayed - replays == number
            counts.append(len(ran) - 1)  # without the replay, which is a run here
        assert counts == runs


def test_unloading_lets_graphs_and_their_runners_go(tmp_path: Path) -> None:
    opened, made = session(tmp_path)
    for _ in range(3):
        opened.run({"x": torch.ones(2, 4)})
    held = opened.bytes
    assert held > 1000, "what graphs take counts"
    opened.unload()
    assert opened.graphs is None
    assert not opened.loaded
    x = torch.randn(2, 4)
    assert torch.equal(opened.run({"x": x})["x"], x * 2)
    assert len(made) == 3, "one that was open, its graph's, and one that is opened again"


def test_an_input_that_its_family_calls_steady_is_copied_when_another_tensor_comes(tmp_path: Path) -> None:
    opened, _made = session(tmp_path)
    specs = [TensorSpec("x", "float32", (Dim("B"), 4), steady=True)]
    family: Any = SimpleNamespace(inputs=lambda *_: specs, engine_inputs=lambda *_: specs)
    opened.sync_from(SimpleNamespace(module=torch.nn.Module(), architecture=lambda: family), None)
    x = torch.ones(2, 4)
    for _ in range(3):
        opened.run({"x": x})
    x += 1  # not seen: the same object
    assert torch.equal(opened.run({"x": x})["x"], 2 * torch.ones(2, 4))
    assert torch.equal(opened.run({"x": x.clone()})["x"], 2 * x)


def test_a_backend_that_cannot_be_captured_runs_plainly(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(CapturableRunner, "capturable", False)
    opened, made = session(tmp_path)
    for _ in range(3):
        opened.run({"x": torch.ones(2, 4)})
    assert opened.graphs is None
    assert not opened.joins_stacks
    assert len(made) == 1
    assert len(made[0].shapes) == 3


def test_a_call_that_the_engine_was_not_built_for_tells_its_sizes(tmp_path: Path) -> None:
    opened, _made = session(tmp_path)
    with pytest.raises(Unavailable) as refused:
        opened.run({"x": torch.ones(9, 4)})
    assert refused.value.fallback.reason is Reason.SHAPE_OUTSIDE_PROFILE
    assert refused.value.fallback.sizes == {"B": 9}


def spec(name: str, *rest: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, (Dim("B"), *rest))


SPECS = [spec("small", 4, 2, 2), spec("large", 4, 8, 8), spec("twin", 4, 2, 2),
         spec("half", 4, dtype="float16")]  # fmt: skip


def test_zeros_have_the_shape_dtype_and_layout_that_is_asked_for() -> None:
    zeros = Zeros(
        CPU, lambda shape: strides_of(shape, torch.channels_last if len(shape) == 4 else torch.contiguous_format)
    )
    found = zeros.of(SPECS, {"B": 2})
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "small": ((2, 4, 2, 2), torch.float32), "large": ((2, 4, 8, 8), torch.float32),
        "twin": ((2, 4, 2, 2), torch.float32), "half": ((2, 4), torch.float16),
    }  # fmt: skip
    assert not any(tensor.any() for tensor in found.values())
    assert found["large"].is_contiguous(memory_format=torch.channels_last)
    assert Zeros(CPU).of(SPECS, {"B": 2})["large"].is_contiguous()


def test_all_zeros_of_a_dtype_lie_in_the_memory_of_the_largest_and_come_again() -> None:
    zeros = Zeros(CPU)
    found = zeros.of(SPECS, {"B": 2})
    places = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found.values()}
    assert sorted(places.values()) == [2 * 4 * 2, 2 * 4 * 8 * 8 * 4]
    assert all(again is found[name] for name, again in zeros.of(SPECS, {"B": 2}).items())
    larger = zeros.of(SPECS[:1], {"B": 300})["small"]
    assert larger.shape == (300, 4, 2, 2)
    assert not larger.any()
    assert not found["large"].any()
