"""Builds as jobs: one queue, one at a time, cancelled and killed at any point; the library never sees half of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builds import (
    children,
    contents,
    gone,
    order,
    read_only,
    slow_backend,
    small_disk,
    small_network,
    until,
)
from hybrid_trt.backends import BuildError, backends
from hybrid_trt.engine_builder import build as build_module
from hybrid_trt.engine_builder import jobs as jobs_module
from hybrid_trt.engine_builder.build import BuildOrder
from hybrid_trt.engine_builder.jobs import BuildQueue, Job, State
from hybrid_trt.engine_library import Library, LibraryError
from hybrid_trt.engine_library.native import NativeNetwork

LIMIT = 2.0
"""Seconds in which a cancel has to take effect."""


@pytest.fixture
def queue() -> Iterator[BuildQueue]:
    made = BuildQueue()
    yield made
    made.close()


@pytest.fixture(scope="module")
def network() -> NativeNetwork:
    return small_network()


@pytest.fixture
def backend() -> Iterator[Any]:
    with slow_backend() as slow:
        yield slow


@pytest.fixture
def idle_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Builds that take until they are cancelled and do nothing; the labels of those that began."""
    begun: list[str] = []

    def build(order: BuildOrder, library: Library, progress: Callable[[str, float], None], *_: Any, **__: Any) -> None:
        begun.append(order.network.label)
        while True:
            progress("idling", 0.5)
            time.sleep(0.02)

    monkeypatch.setattr(jobs_module, "build_engine", build)
    return begun


def orders(network: NativeNetwork, count: int) -> list[BuildOrder]:
    """Orders that differ in their profile."""
    first = order(network, backends()["onnxruntime"])
    return [
        BuildOrder(network, precision, first.profile.only("BHWT"[: 1 + n % 4]), first.backend, first.device)
        for n, precision in enumerate(f"float{bits}" for bits in range(count))
    ]


def test_fifty_queued_builds_are_cancelled_at_once(
    queue: BuildQueue, network: NativeNetwork, idle_builds: list[str], tmp_path: Path
) -> None:
    queued = [queue.submit(one, Library([tmp_path])) for one in orders(network, 50)]
    assert len({job.id for job in queued}) == 50
    assert until(lambda: idle_builds, LIMIT)
    begun = time.monotonic()
    for job in queued:
        assert queue.cancel(job)
    assert all(job.wait(0) and job.state is State.CANCELLED for job in queued)
    queue.close()
    assert time.monotonic() - begun < LIMIT
    assert len(idle_builds) == 1, "the others never began"
    assert contents(tmp_path) == []


def test_fifty_queued_builds_behind_a_real_one_leave_no_process_and_no_file(
    queue: BuildQueue, network: NativeNetwork, backend: Any, tmp_path: Path
) -> None:
    queued = [queue.submit(order(network, backend), Library([tmp_path]))]
    queued += [queue.submit(one, Library([tmp_path])) for one in orders(network, 49)]
    assert until(children, 30)
    processes = children()
    begun = time.monotonic()
    for job in queued:
        assert queue.cancel(job)
    assert gone(processes, LIMIT)
    assert until(lambda: contents(tmp_path) == [], LIMIT)
    assert time.monotonic() - begun < LIMIT
    assert all(job.state is State.CANCELLED for job in queued)
    time.sleep(0.5)
    assert children() == [], "a cancelled build began"


def test_the_same_order_joins_the_job_that_is_there(
    queue: BuildQueue, network: NativeNetwork, idle_builds: list[str], tmp_path: Path
) -> None:
    library = Library([tmp_path])
    one, other = orders(network, 2)
    first = queue.submit(one, library)
    assert queue.submit(one, library) is first
    assert queue.submit(other, library) is not first
    assert queue.submit(one, Library([tmp_path / "another"])) is not first
    clone = NativeNetwork(network.patcher.clone(), network.module, network.prefix, network.dtype, "another name")
    assert queue.submit(BuildOrder(clone, one.precision, one.profile, one.backend), library) is first
    queue.cancel(first)
    assert queue.submit(one, library) is not first


def test_one_is_built_at_a_time_and_listeners_hear_of_everything(
    queue: BuildQueue, network: NativeNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0

    def build(_order: Any, _library: Any, progress: Callable[[str, float], None], *_: Any, **__: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for step in range(5):
            progress("working", step / 5)
            time.sleep(0.01)
        running -= 1

    monkeypatch.setattr(jobs_module, "build_engine", build)
    heard: list[tuple[str, str]] = []

    def broken(_job: Job) -> None:
        raise RuntimeError("a listener's own mistake")

    queue.subscribe(broken)
    stop = queue.subscribe(lambda job: heard.append((job.id, job.state.value)))
    queued = [queue.submit(one, Library([tmp_path])) for one in orders(network, 4)]
    assert all(job.wait(5) for job in queued)
    assert most == 1
    assert until(lambda: (queued[-1].id, "done") in heard, 1)
    for job in queued:
        states = [state for number, state in heard if number == job.id]
        assert states[0] == "queued"
        assert list(dict.fromkeys(states)) == ["queued", "running", "done"]
    stop()
    queue.submit(orders(network, 5)[4], Library([tmp_path])).wait(5)
    assert len({number for number, _ in heard}) == 4


def test_a_failure_is_told_and_the_next_build_runs(
    queue: BuildQueue, network: NativeNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [MemoryError("no room"), LibraryError("the disk of x is full. Delete something")]
    monkeypatch.setattr(jobs_module, "build_engine", lambda *_, **__: (_ for _ in ()).throw(errors.pop(0)))
    first, second = (queue.submit(one, Library([tmp_path])) for one in orders(network, 2))
    assert first.wait(5)
    assert second.wait(5)
    assert first.state is second.state is State.FAILED
    assert "MemoryError (no room)" in first.message
    assert "native keeps serving" in first.message
    assert second.message == "The disk of x is full. Delete something."
    assert second.to_json()["state"] == "failed"
    assert "The disk of x is full. Delete something." in second.log[-1]


def succeed(*_: Any, **__: Any) -> None:
    pass


def fail(order: BuildOrder, *_: Any, **__: Any) -> None:
    raise BuildError(f"{order.network.label} is not to be built")


@pytest.mark.parametrize("build", [succeed, fail])
def test_a_job_that_ended_holds_no_model(
    queue: BuildQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable
) -> None:
    import gc
    import weakref

    monkeypatch.setattr(jobs_module, "build_engine", build)
    model = small_network()
    alive = weakref.ref(model.patcher.model)
    job = queue.submit(order(model, backends()["onnxruntime"]), Library([tmp_path]))
    assert job.wait(5)
    del model

    def freed() -> bool:
        gc.collect()
        return alive() is None

    assert until(freed, 2)


PHASES = ["starting the exporter", "exporting", "checking against native", "slow: compiling"]
SECOND_PROCESS = "the backend's process starts"


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancel_takes_effect_within_two_seconds_in_every_phase(
    queue: BuildQueue, network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", "silence")
    job = queue.submit(order(network, backend), Library([tmp_path]))
    assert until(lambda: job.phase == phase or job.state.final, 60)
    assert job.state is State.RUNNING, job.message
    processes = children()
    assert processes
    begun = time.monotonic()
    queue.cancel(job)
    assert job.state is State.CANCELLED
    assert gone(processes, LIMIT)
    assert until(lambda: contents(tmp_path) == [], LIMIT)
    assert time.monotonic() - begun < LIMIT


def builder_at(job: Job, point: str) -> int:
    """Process id of the builder when a job has come to a phase, or to the start of its second process."""
    if point == SECOND_PROCESS:
        first = builder_at(job, PHASES[2])
        assert until(lambda: job.state.final or any(p.pid != first for p in children()), 60)
    else:
        assert until(lambda: job.phase == point or job.state.final, 60)
    assert job.state is State.RUNNING, job.message
    return children()[0].pid


@pytest.mark.parametrize("phase", [*PHASES, SECOND_PROCESS])
def test_a_builder_that_is_killed_fails_the_job_and_the_next_one_succeeds(
    queue: BuildQueue, network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", "silence")
    library = Library([tmp_path])
    job = queue.submit(order(network, backend), library)
    os.kill(builder_at(job, phase), signal.SIGKILL)
    assert job.wait(5)
    assert job.state is State.FAILED
    assert "SIGKILL" in job.message
    assert "native keeps serving" in job.message
    assert contents(tmp_path) == []
    if phase == PHASES[-1]:
        monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", "finish")
        again = queue.submit(order(network, backend), library)
        assert again.wait(60)
        assert again.state is State.DONE, again.message
        assert contents(tmp_path) == [again.engine.folder.name]
        third = queue.submit(order(network, backend), library)
        assert third.wait(5)
        assert third.engine == again.engine, "it is there and is not built again"


def run_build(network: NativeNetwork, backend: Any, folder: Path) -> str:
    """The message of a build that has to fail."""
    with pytest.raises(LibraryError) as failed:
        build_module.build_engine(order(network, backend), Library([folder]), lambda *_: None)
    return str(failed.value)


def test_too_little_room_is_told_before_anything_is_done(
    network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_trt.engine_library.disk.free_bytes", lambda _: 1_000_000)
    message = run_build(network, backend, tmp_path)
    assert "Building the engine of small_1.safetensors needs about" in message
    assert "its disk has 1.0 MB free" in message
    assert "extra_model_paths.yaml" in message
    assert contents(tmp_path) == []


@pytest.mark.parametrize("megabytes", [1, 30], ids=["while reading weights", "while exporting"])
def test_a_disk_that_runs_full_is_told_and_left_clean(
    network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    monkeypatch.setattr(build_module, "ROOM", 0)
    with small_disk(tmp_path / "disk", megabytes) as disk:
        message = run_build(network, backend, disk)
        assert "is full" in message
        assert "delete engines" in message
        assert contents(disk) == []
    assert children() == []


def test_a_read_only_library_is_told(network: NativeNetwork, backend: Any, tmp_path: Path) -> None:
    with read_only(tmp_path / "library") as folder:
        message = run_build(network, backend, folder)
    assert "cannot be written" in message
    assert "give ComfyUI the right to write there" in message


def pretend(task: dict, *_: Any) -> dict:
    """Both steps without their work."""
    folder = Path(task["folder"])
    if task["step"] == "export":
        (folder / "parameters.json").write_text("{}")
        return {"onnx": "model.onnx", "parity": {"rel_err": 0.0}, "seconds": {}}
    (folder / "engine.slow").write_bytes(b"slow")
    return {"files": ["engine.slow"], "seconds": {}}


def test_weights_that_change_while_they_are_read_are_read_again(
    network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_hash = network.weights_hash()
    hashes = iter(["0" * 64, true_hash])
    monkeypatch.setattr(NativeNetwork, "weights_hash", lambda *_: next(hashes))
    monkeypatch.setattr(NativeNetwork, "forget_hash", lambda *_: None)
    engine = build_module.build_engine(order(network, backend), Library([tmp_path]), lambda *_: None, run=pretend)
    assert engine.manifest.identity.weights == true_hash
    assert contents(tmp_path) == [engine.folder.name]


def test_a_change_of_version_or_weights_builds_anew_and_the_same_does_not(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library([tmp_path])
    steps: list[str] = []

    def build(network: NativeNetwork, **options: Any) -> str:
        def run(task: dict, *rest: Any) -> dict:
            steps.append(task["step"])
            return pretend(task, *rest)

        made = build_module.build_engine(order(network, backend), library, lambda *_: None, run=run, **options)
        return made.folder.name

    first = build(small_network(1))
    assert build(small_network(1)) == first
    assert steps == ["export", "build"]
    monkeypatch.setenv("HYBRID_TRT_TEST_VERSION", "2")
    second = build(small_network(1))
    third = build(small_network(2))
    assert len({first, second, third}) == 3
    assert build(small_network(2), again=True) == third
    assert len(steps) == 8
    (tmp_path / third / "engine.slow").write_bytes(b"")
    assert build(small_network(2)) == third, "a broken engine is replaced"
    assert contents(tmp_path) == sorted([first, second, third])
    assert (tmp_path / third / "engine.slow").read_bytes() == b"slow"


def test_the_second_builder_of_a_key_waits_and_takes_the_firsts_engine(
    network: NativeNetwork, backend: Any, tmp_path: Path
) -> None:
    engines, phases, steps = [], [], []
    waiting = threading.Event()

    def run(task: dict, *rest: Any) -> dict:
        steps.append(task["step"])
        assert waiting.wait(10)
        return pretend(task, *rest)

    def progress(phase: str, _fraction: float) -> None:
        phases.append(phase)
        if phase.startswith("waiting"):
            waiting.set()

    def build() -> None:
        # two libraries on one folder: as two processes have them, whose locks are as separate
        engines.append(build_module.build_engine(order(network, backend), Library([tmp_path]), progress, run=run))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert engines[0].manifest == engines[1].manifest
    assert steps == ["export", "build"]
    assert f"waiting for the same engine that process {os.getpid()}" in " ".join(phases)
    assert contents(tmp_path) == [engines[0].folder.name]
