"""Sizes of one order are compiled side by side: as one child does it, and alone on the device where it counts."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import PROFILE, children, contents, gone, order, slow_backend, small_network, until
from compiling import COMPILES
from fake_recorder import Recorder
from hybrid_trt.architectures import architecture_of
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import LiveTask, backends
from hybrid_trt.backends.gpu_lock import WAITING, GpuLock
from hybrid_trt.backends.torch_inductor import attention, benchmarks, compile_step, compiled, parts
from hybrid_trt.backends.torch_inductor.session import LiveSession
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import side_by_side
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.jobs import BuildQueue, State
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker.main import in_json
from hybrid_trt.engine_library import BuildError, Engine, Library, trust
from hybrid_trt.engine_library.atomic_files import FileLock
from hybrid_trt.engine_library.engine import relative_error
from small_networks import native_call
from small_networks import network as network_of
from windows_rules import windows_rules

SIZES = {"H": 16, "W": 16, "T": 77}


@pytest.fixture(scope="module")
def network() -> NativeNetwork:
    return small_network()


@pytest.fixture
def backend() -> Iterator[Any]:
    with slow_backend("sized") as sized:
        yield sized


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many children this machine has room for."""

    def say(count: int) -> None:
        monkeypatch.setattr(side_by_side, "children_with_room", lambda _task: count)

    say(4)
    return say


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[dict]]:
    file = tmp_path / "journal"
    monkeypatch.setenv("HYBRID_TRT_TEST_JOURNAL", str(file))

    def read(what: str) -> list[dict]:
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line["what"] == what]

    return read


@pytest.fixture
def sized_order(network: NativeNetwork, backend: Any, journal: Any, room: Any, monkeypatch: Any) -> Any:
    """Makes an order for some batches, the backend behaving as told with each."""

    def make(behaviours: dict[int, str] | None = None, batches: tuple[int, ...] = (2, 1)) -> BuildOrder:
        monkeypatch.setenv("HYBRID_TRT_TEST_SIZES", json.dumps(behaviours or {}))
        plain = order(network, backend)
        return BuildOrder(network, "float32", plain.profile, backend, calls=tuple({**SIZES, "B": b} for b in batches))

    return make


def built(wanted: BuildOrder, folder: Path, progress: Any = None, log: Any = None) -> Engine:
    library = Library([folder])
    return build_engine(wanted, library, progress or (lambda *_: None), log or (lambda _: None))


def test_the_engine_is_that_of_one_child_and_took_the_seconds_that_went_by(
    sized_order: Any, room: Any, journal: Any, tmp_path: Path
) -> None:
    wanted = sized_order({1: "late", 2: "late"})
    started = time.perf_counter()
    several = built(wanted, tmp_path / "several").manifest
    took = time.perf_counter() - started
    assert len({line["pid"] for line in journal("compiling")}) == 2
    room(1)
    one = built(wanted, tmp_path / "one").manifest
    assert several.files == one.files
    assert several.parity == one.parity
    assert [case["B"] for case in several.parity["cases"]] == [2, 1]
    assert several.seconds.keys() == one.seconds.keys()
    assert all(value >= 0 for value in several.seconds.values())
    assert sum(several.seconds.values()) == pytest.approx(took, rel=0.1, abs=0.5)
    compiled = [value for name, value in several.seconds.items() if name.startswith("compile_")]
    assert 1.5 <= sum(compiled) < 3.0, "what went by, not what each of them took"


def test_nothing_but_the_engine_is_left_in_its_folder(sized_order: Any, tmp_path: Path) -> None:
    engine = built(sized_order(), tmp_path / "library")
    left = {path.name for path in engine.folder.iterdir()}
    assert not left & {side_by_side.LOCK_NAME, side_by_side.GONE_NAME}
    assert len([name for name in left if name.endswith(".bin")]) == 2


def test_children_use_the_device_in_turns_and_who_measures_is_alone(
    sized_order: Any, journal: Any, tmp_path: Path
) -> None:
    built(sized_order({3: "late"}, (4, 3, 2, 1)), tmp_path / "library")
    turns = sorted((line["began"], line["ended"], line["pid"]) for line in journal("turn"))
    assert len({pid for *_, pid in turns}) == 4
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(turns))
    (measured,) = journal("measured")
    pids = {line["batch"]: line["pid"] for line in journal("compiling")}
    assert measured["pid"] == pids[4], "the first size is the one on record"
    assert measured["siblings"] == [], "whose processes have ended"


@pytest.mark.parametrize(("device", "turns", "expected"), [
    ("cuda", GpuLock(), ["measuring", "measured"]),
    ("cuda", GpuLock(gone=Path(__file__)), [WAITING, "measuring", "measured"]),
    ("cuda", GpuLock(measures=False), []),
    ("cpu", GpuLock(), []),
])  # fmt: skip
def test_what_a_call_takes_is_measured_on_a_gpu_by_one_child_after_it_has_waited(
    device: str, turns: GpuLock, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(compile_step, "_figures", lambda *_: done.append("measured") or {"native_ms": 1.0})
    task = LiveTask((), (), [SIZES], "float16", torch.device(device), tmp_path, turns)
    figures = compile_step._figures_alone(torch.nn.Identity(), task, [], [], None, lambda phase, _: done.append(phase))
    assert done == expected
    assert figures == ({"native_ms": 1.0} if expected else {})


def test_more_sizes_than_there_is_room_for_are_dealt_out(
    sized_order: Any, room: Any, journal: Any, tmp_path: Path
) -> None:
    room(2)
    manifest = built(sized_order(batches=(4, 1, 3, 2)), tmp_path / "library").manifest
    by_pid: dict[int, list[int]] = {}
    for line in journal("compiling"):
        by_pid.setdefault(line["pid"], []).append(line["batch"])
    assert sorted(by_pid.values()) == [[1, 2], [4, 3]]
    assert [case["B"] for case in manifest.parity["cases"]] == [4, 1, 3, 2]


def test_one_size_is_compiled_as_ever_and_no_room_is_asked_for(
    sized_order: Any, journal: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(side_by_side, "children_with_room", lambda _task: pytest.fail("it was asked"))
    built(sized_order(batches=(2,)), tmp_path / "library")
    (line,) = journal("compiling")
    assert line["siblings"] is False


def test_a_benchmark_may_have_the_sizes_compiled_one_after_the_other(
    sized_order: Any, journal: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(side_by_side, "MOST", 1)
    built(sized_order(), tmp_path / "library")
    first, second = journal("compiling")
    assert first["pid"] == second["pid"]


def test_the_bar_only_moves_forward_and_says_how_many_sizes_are_compiled(sized_order: Any, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    built(sized_order({1: "last"}), tmp_path / "library", lambda *event: told.append(event))
    phases = list(dict.fromkeys(phase for phase, _ in told))
    compiling = [phase for phase in phases if phase.startswith("compiling")]
    assert compiling == ["compiling 2 sizes side by side", "compiling 2 sizes side by side, 1 done"]
    fractions = [fraction for phase, fraction in told if phase in compiling]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.2
    assert fractions[-1] > 0.4


def test_the_log_has_whole_lines_and_says_whose(sized_order: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    built(sized_order({1: "talks", 2: "talks"}), tmp_path / "library", log=lines.append)
    for name in ("[B1]", "[B2]"):
        own = [line for line in lines if line.startswith(f"{name} line ")]
        assert own == [f"{name} line {number} of a child is whole" for number in range(100)]


def test_the_first_failure_is_told_and_the_others_are_ended(sized_order: Any, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"failed while compiling for batch 1 \(RuntimeError: the compiler is confus"):
        built(sized_order({1: "fails", 2: "fails_later", 3: "silence"}, (2, 1, 3)), tmp_path / "library")
    assert time.monotonic() - started < 60
    assert children() == []
    assert contents(tmp_path / "library") == []


def test_a_cancel_ends_all_of_them_within_two_seconds(sized_order: Any, journal: Any, tmp_path: Path) -> None:
    queue = BuildQueue()
    try:
        job = queue.submit(sized_order({1: "silence", 2: "silence"}), Library([tmp_path / "library"]))
        assert until(lambda: len(journal("compiling")) == 2 or job.state.final, 60)
        assert job.state is State.RUNNING, job.message
        processes = children()
        assert len(processes) == 2
        begun = time.monotonic()
        queue.cancel(job)
        assert gone(processes)
        assert until(lambda: contents(tmp_path / "library") == [], 2.0)
        assert time.monotonic() - begun < 2.0
    finally:
        queue.close()


@pytest.mark.parametrize("behaviour", ["killed_in_company", "gpu_full_in_company"])
def test_what_lacks_memory_in_company_is_compiled_one_size_after_the_other(
    sized_order: Any, journal: Any, tmp_path: Path, behaviour: str
) -> None:
    lines: list[str] = []
    told: list[float] = []
    wanted = sized_order({1: behaviour})
    engine = built(wanted, tmp_path / "library", lambda _, fraction: told.append(fraction), lines.append)
    assert [case["B"] for case in engine.manifest.parity["cases"]] == [2, 1]
    assert engine.manifest.parity["native_ms"] == 1002.0
    alone = [line["batch"] for line in journal("compiling") if not line["siblings"]]
    assert alone == [2, 1]
    said = next(i for i, line in enumerate(lines) if "with 2 processes at once: the builder " in line)
    assert lines[said + 1] == "that may be for want of memory: now the sizes are compiled one after the other"
    compiling = [fraction for fraction in told if 0.1 <= fraction <= 0.9]
    assert compiling == sorted(compiling)


def test_what_is_not_compiled_in_parts_is_compiled_as_a_whole(
    sized_order: Any, backend: Any, room: Any, journal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(3)
    monkeypatch.setattr(backend, "in_parts", True)
    lines: list[str] = []
    engine = built(sized_order({2: "fails_in_company"}, (2,)), tmp_path / "library", log=lines.append)
    assert [case["B"] for case in engine.manifest.parity["cases"]] == [2]
    assert [line["siblings"] for line in journal("compiling")][-1] is False
    assert any("the compiler is confused by parts" in line for line in lines)
    assert any("because they were compiled in parts" in line for line in lines)


def test_what_lacks_memory_alone_too_fails_with_that_message(sized_order: Any, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="ended by SIGKILL, most often because the machine ran out of memory"):
        built(sized_order({1: "killed"}), tmp_path / "library")
    assert children() == []


@pytest.mark.parametrize(("error", "crowded"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (MemoryError(), True),
    (PermissionError(13, "another process has the file open"), True),
    (RuntimeError("A process in the process pool was terminated abruptly"), True),
    (RuntimeError("the compiler is confused"), False),
    (BuildError("what Inductor compiled differs from native"), False),
])  # fmt: skip
def test_a_failure_says_whether_company_may_be_its_cause(error: Exception, crowded: bool) -> None:
    assert in_json(error)["crowded"] is crowded
    wrapped = BuildError("Inductor could not compile the network, so no engine was made")
    wrapped.__cause__ = error
    assert in_json(wrapped) == {"kind": "build", "text": str(wrapped), "crowded": crowded}


@COMPILES
def test_inductor_times_kernels_in_turns_while_it_compiles_and_as_ever_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime import benchmarking

    lock, held = tmp_path / "lock", []

    def measure(_self: Any, call: Callable[[], Any], **_: Any) -> float:
        held.append(not FileLock(lock).acquire())
        return call()

    monkeypatch.setattr(type(benchmarking.benchmarker), "benchmark_gpu", measure)
    with benchmarks.in_turn(GpuLock(lock)):
        assert benchmarking.benchmarker.benchmark(lambda: 1.5, device="cuda") == 1.5
    assert held == [True]
    lock.unlink(missing_ok=True)
    assert benchmarking.benchmarker.benchmark(lambda: 2.5, device="cuda") == 2.5
    assert held == [True, False]


def test_a_torch_that_times_kernels_otherwise_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import benchmarking

    monkeypatch.delattr(benchmarking, "benchmarker")
    with benchmarks.in_turn(GpuLock(tmp_path / "lock")):
        assert not hasattr(benchmarking, "benchmarker")


def test_in_company_a_kernel_that_lacked_memory_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(_name: str) -> float:
        raise RuntimeError("CUDA out of memory")

    assert attention.fastest("flash", lacks) == ("flash", {})
    with pytest.raises(RuntimeError, match="out of memory"):
        attention.fastest("flash", lacks, crowded=True)


def test_a_lock_that_cannot_be_had_is_done_without(tmp_path: Path) -> None:
    with GpuLock(tmp_path / "no folder" / "lock").taken():
        pass


def test_turns_survive_the_way_to_a_child(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    for turns in (GpuLock(), GpuLock(lock, tmp_path / "gone", True, 4), GpuLock(lock, None, False)):
        assert GpuLock.from_json(json.loads(json.dumps(turns.to_json()))) == turns
    assert GpuLock.from_json(None) == GpuLock()


def test_turns_hold_under_the_rules_of_windows(tmp_path: Path) -> None:
    inside, seen = [], []

    def take_turns(name: str) -> None:
        for _ in range(20):
            with GpuLock(tmp_path / "lock").taken():
                inside.append(name)
                time.sleep(0.002)
                seen.append(len(inside))
                inside.remove(name)

    with windows_rules():
        threads = [threading.Thread(target=take_turns, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [1] * 60


@pytest.mark.parametrize(("sizes", "room_for", "dealt"), [
    (1, 4, [("1", 0, 4), ("1", 1, 4), ("1", 2, 4), ("1", 3, 4)]), (1, 3, [("1", 0, 3), ("1", 1, 3), ("1", 2, 3)]),
    (1, 1, None), (2, 1, None), (2, 3, [("1", 0, 1), ("2", 0, 1)]),
    (2, 4, [("1", 0, 2), ("1", 1, 2), ("2", 0, 2), ("2", 1, 2)]),
    (3, 5, [("1", 0, 1), ("2", 0, 1), ("3", 0, 1)]),
    (4, 9, [("1", 0, 2), ("1", 1, 2), ("2", 0, 2), ("2", 1, 2), ("3", 0, 2), ("3", 1, 2), ("4", 0, 2), ("4", 1, 2)]),
    (5, 4, [("15", 0, 1), ("2", 0, 1), ("3", 0, 1), ("4", 0, 1)]),
])  # fmt: skip
def test_children_that_no_size_is_left_for_share_one(
    sizes: int, room_for: int, dealt: list | None, room: Any
) -> None:
    room(room_for)
    assert dealt_out(sizes) == ([] if dealt is None else [dealt])


def dealt_out(sizes: int) -> list[list[tuple[str, int, int]]]:
    """Round after round, what each child is to do: its batch sizes, and which of how many parts."""
    task = {"compiled": [{"B": size + 1} for size in range(sizes)], "backend": "torch"}
    return [[("".join(str(size["B"]) for size in own), *part) for own, part in dealt]
            for dealt in side_by_side._rounds(task)]  # fmt: skip


@pytest.mark.parametrize("for_all", [0, 1])
def test_where_the_network_has_room_once_only_its_parts_are_compiled_size_after_size(
    for_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        side_by_side, "children_with_room", lambda task: for_all if len(task["compiled"]) > 1 else 3
    )
    assert dealt_out(2) == [[("1", 0, 3), ("1", 1, 3), ("1", 2, 3)], [("2", 0, 3), ("2", 1, 3), ("2", 2, 3)]]


def test_sizes_compiled_one_after_the_other_in_parts_make_one_engine(
    sized_order: Any, backend: Any, journal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "in_parts", True)
    monkeypatch.setattr(side_by_side, "children_with_room", lambda task: 1 if len(task["compiled"]) > 1 else 2)
    told: list[tuple[str, float]] = []
    manifest = built(sized_order(), tmp_path / "library", lambda *event: told.append(event)).manifest
    assert [case["B"] for case in manifest.parity["cases"]] == [2, 1]
    assert [name[:2] for name in manifest.files] == ["B2", "B1"]
    assert manifest.parity["native_ms"] == 1002.0
    assert {name[8:10] for name in manifest.seconds if name.startswith("compile_")} == {"B2", "B1"}
    assert len(journal("measured")) == 1
    assert [line["batch"] for line in journal("compiling")] == [2, 2, 1, 1]
    assert {phase for phase, _ in told} >= {
        f"size {number} of 2: compiling one size with 2 processes" for number in (1, 2)
    }
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)


def test_a_size_is_shared_only_where_the_backend_can(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room(4)
    torchs = backends()["torch"]
    monkeypatch.setattr(torchs, "in_parts", False)
    assert dealt_out(1) == []
    assert dealt_out(2) == [[("1", 0, 1), ("2", 0, 1)]]


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


@COMPILES
def test_four_processes_compile_two_sizes_in_halves_in_one_cache(
    room: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    room(4)
    net, phases, lines = network_of("controlnet", "inpainting_channels"), [], []
    calls = tuple({"B": batch, "H": 6, "W": 8, "T": 77, "HB": 1} for batch in (2, 1))
    wanted = BuildOrder(net, "float32", PROFILE, backends()["torch"], calls=calls)
    engine = built(wanted, tmp_path / "library", lambda *told: phases.append(told), lines.append)
    assert "compiling 2 sizes with 4 processes" in [phase for phase, _ in phases]
    assert [fraction for _, fraction in phases] == sorted(fraction for _, fraction in phases)
    assert {line[: line.index("]") + 1] for line in lines if line.startswith("[")} >= {
        f"[B{batch}, part {part} of 2]" for batch in (1, 2) for part in (1, 2)
    }
    assert not any("one after the other" in line or "traced otherwise" in line for line in lines)
    cases = engine.manifest.parity["cases"]
    assert [case["B"] for case in cases] == [2, 1]
    assert max(case["rel_err"] for case in cases) <= 1e-5
    left = {path.name for path in engine.folder.iterdir()}
    assert left == {"manifest.json", "checked_here.json", *engine.manifest.files}
    for call in calls:  # the file of each size is that size's
        assert compiled.open_file(engine.folder / compiled.file_name(call)).__class__ is parts.InParts
        assert_serves(engine, net, call)
