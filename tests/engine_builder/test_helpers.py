"""Helpers compile kinds of blocks beside each other, as many as have room; where one fails, the worker compiles."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builds import PROMPTLY, children, contents, gone, order, slow_backend, small_network, until
from compiling import COMPILES
from fake_recorder import Recorder
from hybrid_trt.backends import LiveTask, backends
from hybrid_trt.backends.torch_inductor import compile_blocks, compile_kinds
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.jobs import BuildQueue, State
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker import helpers
from hybrid_trt.engine_library import BuildError, Engine, Library, trust
from live_sessions import PROFILE, error, given_for
from small_networks import ONE_LEVEL
from small_networks import network as network_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> NativeNetwork:
    return small_network()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has room for two helpers."""
    monkeypatch.setattr(helpers, "room_for_helpers", lambda _device: 2)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict]]:
    """Return what was compiled, and how."""
    file = tmp_path / "journal"
    monkeypatch.setenv("HYBRID_TRT_TEST_JOURNAL", str(file))
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def helped_order(network: NativeNetwork, journal: Any, two: None, monkeypatch: Any) -> Iterator[Any]:
    """Makes an order, the backend behaving as told."""
    with slow_backend("helped") as backend:

        def make(behaviour: str) -> BuildOrder:
            monkeypatch.setenv("HYBRID_TRT_TEST_BEHAVIOUR", behaviour)
            return order(network, backend)

        yield make


def built(wanted: BuildOrder, folder: Path, **more: Any) -> Engine:
    return build_engine(wanted, Library([folder]), lambda *_: None, **more)


@pytest.mark.parametrize(("behaviour", "why"), [
    ("fails", "RuntimeError: ValueError: invalid literal for int"),
    ("loses_a_helper", "one of the processes that compile has ended")])  # fmt: skip
def test_what_a_helper_says_or_that_it_ended_is_told_to_the_worker(
    helped_order: Any, journal: Any, tmp_path: Path, behaviour: str, why: str
) -> None:
    with pytest.raises(BuildError, match=why):
        built(helped_order(behaviour), tmp_path / "library")
    assert len(set(journal()[0]["helpers"])) == 2, "each call goes to one that is idle"
    assert until(lambda: not children(), PROMPTLY)
    assert contents(tmp_path / "library") == []


def test_a_cancel_ends_all_of_them_promptly(helped_order: Any, journal: Any, tmp_path: Path) -> None:
    queue = BuildQueue()
    try:
        job = queue.submit(helped_order("silence"), Library([tmp_path / "library"]))
        assert until(lambda: len(journal()) == 1 or job.state.final, 60)
        assert job.state is State.RUNNING, job.message
        processes = children()
        assert {process.pid for process in processes} >= {journal()[0]["pid"], *journal()[0]["helpers"]}
        begun = time.monotonic()
        queue.cancel(job)
        assert gone(processes)
        assert until(lambda: contents(tmp_path / "library") == [], PROMPTLY)
        assert time.monotonic() - begun < PROMPTLY
    finally:
        queue.close()


def assert_serves(engine: Engine, net: NativeNetwork) -> None:
    """A session with the engine computes what native does."""
    session = LiveSession(net, backends()["torch"], "float32", Recorder())
    session.use([engine])
    assert error(session, net, given_for(net, 3)) <= 1e-5
    assert (session.serving, session.refusal) == ([engine], None)
    blocks = session.live.compiled
    assert blocks.plain == 0


@COMPILES
def test_two_helpers_compile_all_kinds_of_a_network(
    two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    net, lines, told = network_of("controlnet", ONE_LEVEL), [], []
    order = BuildOrder(net, "float32", PROFILE, backends()["torch"])
    library = Library([tmp_path / "library"])
    engine = build_engine(order, library, lambda _, done: told.append(done), lines.append)
    assert told == sorted(told), "the bar only moves forward"
    assert not [line for line in lines if "a helper failed" in line], lines
    assert max(case["rel_err"] for case in engine.manifest.parity["cases"]) <= 1e-5
    assert_serves(engine, net)


@COMPILES
def test_kinds_that_helpers_could_not_compile_the_worker_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    @contextmanager
    def failing(count: int) -> Iterator[Any]:
        asked.append(count)

        def submit(*_: Any) -> Any:
            return SimpleNamespace(result=lambda: (_ for _ in ()).throw(RuntimeError("it has ended")))

        yield submit

    own = compile_kinds.compile_alone
    alone: list[str] = []

    def noted(alike: Any, *more: Any) -> Any:
        alone.append(alike.key)
        return own(alike, *more)

    monkeypatch.setattr(compile_blocks, "compile_alone", noted)
    net = network_of("controlnet", ONE_LEVEL)
    compiled = compile_blocks.compile_blocks

    def with_helpers(function: Any, given: LiveTask, progress: Any) -> dict:
        return compiled(function, LiveTask(**{**vars(given), "most_helpers": 8, "helpers": failing}), progress)

    monkeypatch.setattr(compile_blocks, "compile_blocks", with_helpers)
    engine = built(BuildOrder(net, "float32", PROFILE, backends()["torch"]), tmp_path / "library", run=run_here)
    assert_serves(engine, net)
    assert asked == [len(alone)] == [5], "no more helpers than kinds"
    assert "it has ended" in caplog.text


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with room for many; what it has may be taken from it."""
    machine = SimpleNamespace(cores=64, main=1e12, gpu=1e12)
    monkeypatch.setattr(helpers, "MOST", 99)
    monkeypatch.setattr(helpers, "processors", lambda: machine.cores)
    monkeypatch.setattr(helpers, "available_bytes", lambda: int(machine.main))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _gpu: (int(machine.gpu), int(2 * machine.gpu)))
    return machine


@pytest.mark.parametrize(("what", "room_for"), [
    ("cores", {1: 0, 3: 0, 4: 2, 7: 3, 64: 32}),
    ("main", {5.9e9: 0, 6e9: 2, 8e9: 3}),
    ("gpu", {5.3e9: 0, 5.5e9: 2, 6.7e9: 3}),
])  # fmt: skip
def test_helpers_are_as_many_as_each_resource_has_room_for(
    large_machine: SimpleNamespace, what: str, room_for: dict[float, int]
) -> None:
    for amount, count in room_for.items():
        setattr(large_machine, what, amount)
        assert helpers.room_for_helpers(torch.device("cuda", 0)) == count, amount


def test_a_gpu_that_tells_nothing_has_room_for_none(
    large_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_gpu: torch.device) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert helpers.room_for_helpers(torch.device("cuda", 0)) == 0
    assert helpers.room_for_helpers(CPU) == 32


def test_a_container_has_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "CGROUP", tmp_path)
    every = helpers.processors()
    assert every >= 1
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert helpers.processors() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert helpers.processors() == every
