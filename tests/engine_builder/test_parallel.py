"""Several processes compile one order as one does, as many as have room; where they fail, one does it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slow
import torch
from builds import PROFILE, PROMPTLY, children, contents, gone, order, slow_backend, small_network, until
from compiling import COMPILES
from fake_recorder import Recorder
from hybrid_trt.architectures import architecture_of
from hybrid_trt.architectures.shapes import Dim, TensorSpec, sample_inputs
from hybrid_trt.backends import LiveTask, backends
from hybrid_trt.backends.torch_inductor import attention, compile_step, compiled, opened_files, parts
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import parallel
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.jobs import BuildQueue, State
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import BuildError, Engine, Library, trust
from hybrid_trt.engine_library.engine import relative_error
from small_networks import ONE_LEVEL, native_call
from small_networks import network as network_of

SIZES = {"H": 16, "W": 16, "T": 77}
X = TensorSpec("x", "float16", (Dim("B"), 4, Dim("H"), Dim("W")))


@pytest.fixture(scope="module")
def network() -> NativeNetwork:
    return small_network()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many processes this machine has room for."""

    def say(count: int) -> None:
        monkeypatch.setattr(parallel, "room_for_processes", lambda _task: count)

    say(2)
    return say


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict]]:
    """Return how sizes were compiled."""
    file = tmp_path / "journal"
    monkeypatch.setenv("HYBRID_TRT_TEST_JOURNAL", str(file))
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def sized_order(network: NativeNetwork, journal: Any, room: Any, monkeypatch: Any) -> Iterator[Any]:
    """Makes an order for batches 2 and 1, the backend behaving as told with batch 1."""
    with slow_backend("sized") as backend:

        def make(behaviour: str = "nothing") -> BuildOrder:
            monkeypatch.setenv("HYBRID_TRT_TEST_SIZES", json.dumps({1: behaviour}))
            calls = tuple({**SIZES, "B": batch} for batch in (2, 1))
            return BuildOrder(network, "float32", order(network, backend).profile, backend, calls=calls)

        yield make


def built(wanted: BuildOrder, folder: Path, progress: Any = None, log: Any = None) -> Engine:
    library = Library([folder])
    return build_engine(wanted, library, progress or (lambda *_: None), log or (lambda _: None))


def test_one_process_compiles_where_no_others_have_room(
    sized_order: Any, room: Any, journal: Any, tmp_path: Path
) -> None:
    room(1)
    built(sized_order(), tmp_path / "library")
    assert [(line["batch"], line["helpers"]) for line in journal()] == [(2, []), (1, [])]


@pytest.mark.parametrize(("behaviour", "why"), slow.cases({
    "fails": ("fails_with_helpers", "RuntimeError: ValueError: invalid literal for int"),
    "loses one": ("loses_a_helper", "one of the processes that compile parts has ended"),
    "killed": ("killed_with_helpers", "ended by SIGKILL"),
}, ["fails", "loses one"]))  # fmt: skip
def test_what_fails_with_helpers_is_done_again_by_one_process(
    sized_order: Any, journal: Any, tmp_path: Path, behaviour: str, why: str
) -> None:
    lines: list[str] = []
    told: list[float] = []
    engine = built(sized_order(behaviour), tmp_path / "library", lambda _, done: told.append(done), lines.append)
    assert [case["B"] for case in engine.manifest.parity["cases"]] == [2, 1]
    assert [(line["batch"], bool(line["helpers"])) for line in journal()] == [(2, 1), (1, 1), (2, 0), (1, 0)]
    assert len(set(journal()[0]["helpers"])) == 2, "each call goes to one that is idle"
    said = next(i for i, line in enumerate(lines) if line.startswith("compiling with 2 processes: "))
    assert why in lines[said]
    assert "now one process compiles all of it" in lines[said + 1]
    compiling = [fraction for fraction in told if 0.1 <= fraction <= 0.9]
    assert compiling == sorted(compiling), "the bar only moves forward"
    assert until(lambda: not children(), PROMPTLY)


@pytest.mark.slow
def test_what_fails_in_one_process_too_fails_with_its_message(sized_order: Any, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"while compiling for batch 1 \(RuntimeError: the compiler is confused"):
        built(sized_order("fails"), tmp_path / "library")
    assert until(lambda: not children(), PROMPTLY)
    assert contents(tmp_path / "library") == []


def test_a_cancel_ends_all_of_them_promptly(sized_order: Any, journal: Any, tmp_path: Path) -> None:
    queue = BuildQueue()
    try:
        job = queue.submit(sized_order("silence"), Library([tmp_path / "library"]))
        assert until(lambda: len(journal()) == 2 or job.state.final, 60)
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


def test_attention_is_timed_before_parts_are_compiled_and_all_else_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def says(what: str, result: Any) -> Callable[..., Any]:
        return lambda *_: done.append(what) or result

    monkeypatch.setattr(attention, "choose", says("attention", ("flash", {})))
    monkeypatch.setattr(compile_step, "compile_in_parts", says("begun", says("compiled", None)))
    monkeypatch.setattr(compile_step, "open_file", says("", lambda *_: [torch.ones(1)]))
    monkeypatch.setattr(compile_step, "compared", says("compared", {"rel_err": 1e-3, "limit": 1e-2}))
    monkeypatch.setattr(compile_step, "figures", says("measured", {"native_ms": 1.0}))
    monkeypatch.setattr(compile_step, "_inputs", says("", []))
    sizes, submit = [{**SIZES, "B": 2}, {**SIZES, "B": 1}], says("", None)
    task = LiveTask((), (), sizes, "float16", torch.device("cuda"), tmp_path, 2, submit)
    made = compile_step.compile_network(torch.nn.Identity(), task, lambda *_: None)
    assert [what for what in done if what] == [
        "attention", "attention", "begun", "begun", "compiled", "compiled", "compared", "compared", "measured",
    ]  # fmt: skip
    assert made["parity"]["native_ms"] == 1.0


def assert_serves(engine: Engine, net: NativeNetwork, call: dict) -> None:
    """A session with the engine computes what native does."""
    given = sample_inputs(architecture_of(net.module).inputs(net.module, "float32"), call, 3)
    session = LiveSession(net, backends()["torch"], "float32", Recorder())
    session.use([engine])
    with torch.inference_mode():
        results, native = session.run(given).values(), native_call(net, given)
    assert session.live.has_compiled(call)
    assert session.refusal is None
    assert max(relative_error(r, n) for r, n in zip(results, native, strict=True)) <= 1e-5


@pytest.mark.slow  # ``test_quantised_engines.py`` compiles with two processes in less time
@COMPILES
def test_two_processes_compile_a_size_in_halves(room: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    net, phases, lines = network_of("controlnet", ONE_LEVEL), [], []
    calls = ({"B": 2, "H": 6, "W": 8, "T": 77, "HB": 1},)
    wanted = BuildOrder(net, "float32", PROFILE, backends()["torch"], calls=calls)
    started = time.perf_counter()
    engine = built(wanted, tmp_path / "library", lambda *told: phases.append(told), lines.append)
    took = time.perf_counter() - started
    assert "compiling for batch 2 with 2 processes" in [phase for phase, _ in phases]
    assert [fraction for _, fraction in phases] == sorted(fraction for _, fraction in phases)
    assert not [line for line in lines if "now one process" in line], lines
    assert sum(engine.manifest.seconds.values()) == pytest.approx(took, rel=0.1, abs=0.5)
    cases = engine.manifest.parity["cases"]
    assert [case["B"] for case in cases] == [2]
    assert max(case["rel_err"] for case in cases) <= 1e-5
    left = {path.name for path in engine.folder.iterdir()}
    assert left == {"manifest.json", "checked_here.json", *engine.manifest.files}
    for call in calls:
        opened = opened_files.open_file(engine.folder / compiled.file_name(call))
        assert opened.__class__ is parts.InParts
        assert len(opened._steps) == 2
        assert_serves(engine, net, call)


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with room for many; what it has may be taken from it."""
    machine = SimpleNamespace(cores=64, main=1e12, gpu=1e12)
    monkeypatch.setattr(parallel, "MOST", 99)
    monkeypatch.setattr(parallel, "MOST_PER_SIZE", 99)
    monkeypatch.setattr(parallel, "processors", lambda: machine.cores)
    monkeypatch.setattr(parallel, "available_bytes", lambda: int(machine.main))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _gpu: (int(machine.gpu), int(2 * machine.gpu)))
    machine.task = {
        "bytes": 0, "backend": "torch", "device": "cuda", "gpu": 0,
        "inputs": [X.to_json()], "outputs": [X.to_json()], "compiled": [{"B": 1, "H": 64, "W": 64}],
    }  # fmt: skip
    return machine


@pytest.mark.parametrize(("what", "room_for"), [
    ("cores", {1: 0, 4: 2, 7: 3, 64: 32}),
    ("main", {2.9e9: 0, 5e9: 2, 7e9: 3}),
    ("gpu", {3.7e9: -1, 3.8e9: 0, 5e9: 1, 6.2e9: 2}),
])  # fmt: skip
def test_processes_are_as_many_as_each_resource_has_room_for(
    large_machine: SimpleNamespace, what: str, room_for: dict[float, int]
) -> None:
    for amount, count in room_for.items():
        setattr(large_machine, what, amount)
        assert parallel.room_for_processes(large_machine.task) == count, amount


def test_a_size_is_cut_into_four_parts_at_most(large_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "MOST_PER_SIZE", 4)
    assert parallel.room_for_processes(large_machine.task) == 4
    assert parallel.room_for_processes({**large_machine.task, "compiled": large_machine.task["compiled"] * 2}) == 8


def test_the_worker_needs_room_for_the_weights_and_its_largest_size(large_machine: SimpleNamespace) -> None:
    task = large_machine.task | {"bytes": 4 * 10**9}
    large_machine.gpu = 1.5 * (6.5e9 + 3 * 0.8e9) + 1e6
    assert parallel.room_for_processes(task) == 3
    large = {**task, "compiled": [*task["compiled"], {"B": 16, "H": 512, "W": 512}]}
    assert parallel.room_for_processes(large) < 2
    large_machine.gpu, large_machine.main = 1e12, 4.6e9 + 3 * 2e9 + 1e6
    assert parallel.room_for_processes(task) == 4, "they are drawn on the GPU"
    assert parallel.room_for_processes({**task, "device": "cpu"}) == 3


def test_a_gpu_that_tells_nothing_has_room_for_no_others(
    large_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_gpu: int) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert parallel.room_for_processes(large_machine.task) == 0
    assert parallel.room_for_processes({**large_machine.task, "device": "cpu"}) == 32


def test_a_container_has_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "CGROUP", tmp_path)
    every = parallel.processors()
    assert every >= 1
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert parallel.processors() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert parallel.processors() == every
