"""Builds as jobs: one queue, one at a time, each key built once; a job that ended holds nothing."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builds import PROMPTLY, backend, children, contents, gone, network, order, pretend, queue, small_network, until
from comfy import model_management
from hybrid_trt.backends import backends
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as build_module
from hybrid_trt.engine_builder import jobs as jobs_module
from hybrid_trt.engine_builder.expected_time import expected_seconds
from hybrid_trt.engine_builder.jobs import BuildQueue, Job, State
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import EngineIdentity, Library, LibraryError, Manifest
from hybrid_trt.engine_library.engine import describe_files

__all__ = ["backend", "network", "queue"]  # fixtures: pytest finds them by name

UNDER_WINDOWS_RULES_TOO = True


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


def test_only_jobs_that_have_ended_are_cleared_and_they_can_still_be_looked_at(
    queue: BuildQueue, network: NativeNetwork, idle_builds: list[str], tmp_path: Path
) -> None:
    ended, alive = (queue.submit(one, Library([tmp_path])) for one in orders(network, 2))
    assert queue.cancel(ended)
    assert [queue.clear_ended(), queue.clear_ended()] == [1, 0]
    assert (ended.cleared, alive.cleared) == (True, False)
    assert queue.get(ended.id) is ended


def test_fifty_queued_builds_behind_a_real_one_leave_no_process_and_no_file(
    queue: BuildQueue, network: NativeNetwork, backend: Any, tmp_path: Path
) -> None:
    queued = [queue.submit(order(network, backend), Library([tmp_path]))]
    queued += [queue.submit(one, Library([tmp_path])) for one in orders(network, 49)]
    assert until(children, 60)
    processes = children()
    begun = time.monotonic()
    for job in queued:
        assert queue.cancel(job)
    assert gone(processes, PROMPTLY)
    assert until(lambda: contents(tmp_path) == [], PROMPTLY)
    assert time.monotonic() - begun < PROMPTLY
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
    assert queue.submit(replace(one, replaceable=True), library) is not first
    clone = replace(network, patcher=network.patcher.clone(), label="another name")
    assert queue.submit(BuildOrder(clone, one.precision, one.profile, one.backend), library) is first
    queue.cancel(first)
    assert queue.submit(one, library) is not first


def test_a_job_that_others_want_goes_on_when_one_of_them_goes_and_a_cancel_is_for_all(
    queue: BuildQueue, network: NativeNetwork, idle_builds: list[str], tmp_path: Path
) -> None:
    library = Library([tmp_path])
    one, other = orders(network, 2)
    job = queue.submit(one, library, waits=True)
    assert queue.submit(one, library, waits=True) is job
    assert not queue.leave(job)
    assert not job.state.final, "the other one still waits"
    assert queue.leave(job)
    assert job.state is State.CANCELLED
    left = queue.submit(other, library)
    assert queue.submit(other, library, waits=True) is left
    assert not queue.leave(left)
    assert not left.state.final, "it was ordered for later by somebody who does not wait"
    queue.submit(other, library, waits=True)
    assert queue.cancel(left)
    assert not queue.leave(left)
    assert left.state is State.CANCELLED


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
    queue.subscribe(lambda job: heard.append((job.id, job.state.value)))
    queued = [queue.submit(one, Library([tmp_path])) for one in orders(network, 4)]
    assert all(job.wait(60) for job in queued)
    assert most == 1
    assert until(lambda: (queued[-1].id, "done") in heard, 60)
    for job in queued:
        states = [state for number, state in heard if number == job.id]
        assert states[0] == "queued"
        assert list(dict.fromkeys(states)) == ["queued", "running", "done"]


@pytest.mark.fault("anything is raised in the thread that builds", see="an error in one sentence; later builds run")
@pytest.mark.parametrize("error", [model_management.InterruptProcessingException(), SystemExit(1), RecursionError("x")])
@pytest.mark.parametrize("where", ["build", "time", "listener"])
def test_the_build_thread_survives_whatever_is_raised_in_it(
    queue: BuildQueue, network: NativeNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    error: BaseException, where: str,
) -> None:
    errors = [error]

    def fail_once(*_: Any, **__: Any) -> None:
        if errors and threading.current_thread().name == "hybrid-trt builds":
            raise errors.pop()

    monkeypatch.setattr(jobs_module, "build_engine", fail_once if where == "build" else succeed)
    monkeypatch.setattr(jobs_module, "expected_seconds", fail_once if where == "time" else lambda *_: None)
    if where == "listener":
        queue.subscribe(fail_once)
    first, second = (queue.submit(one, Library([tmp_path])) for one in orders(network, 2))
    assert first.wait(60)
    assert second.wait(60)
    assert second.state is State.DONE
    if where != "listener" or not isinstance(error, Exception):
        assert first.state is State.FAILED
        assert f"The build stopped with {type(error).__name__}" in first.message
        assert "the normal model keeps running" in first.message


def succeed(*_: Any, **__: Any) -> None:
    pass


def fail(*_: Any, **__: Any) -> None:
    raise LibraryError("the disk of x is full. Delete something")


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
    assert job.wait(60)
    if build is fail:
        assert (job.state, job.message) == (State.FAILED, "The disk of x is full. Delete something.")
        assert job.message in job.log[-1]
    del model

    def freed() -> bool:
        gc.collect()
        return alive() is None

    assert until(freed, 60)


@pytest.mark.fault("weights change while a build reads them", see="nothing: they are read again")
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
    assert build(small_network(2)) == third, "a damaged engine is replaced"
    assert contents(tmp_path) == sorted([first, second, third])
    assert (tmp_path / third / "engine.slow").read_bytes() == b"slow"


@pytest.mark.fault("two processes build the same engine at once", see="nothing: the second takes the first's")
def test_the_second_builder_of_a_key_waits_and_takes_the_firsts_engine(
    network: NativeNetwork, backend: Any, tmp_path: Path
) -> None:
    engines, phases, steps = [], [], []
    waiting = threading.Event()

    def run(task: dict, *rest: Any) -> dict:
        steps.append(task["step"])
        assert waiting.wait(60)
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


def test_the_expected_time_comes_from_builds_like_it_and_from_no_others(
    network: NativeNetwork, backend: Any, tmp_path: Path
) -> None:
    library = Library([tmp_path])
    wanted = order(network, backend)
    assert expected_seconds(wanted, library) is None
    parameters = sum(p.numel() for p in network.module.parameters())

    def record(**changes: Any) -> None:
        identity = {"architecture": "sd15_unet", "weights": secrets.token_hex(32), "precision": wanted.precision,
                    "profile": wanted.profile, "backend": backend.name, "backend_version": "1",
                    "device": backend.target(wanted.target_device)}
        fields = {"kind": network.role.value, "parameters": parameters, "seconds": {"export": 3.0, "other": 1.0},
                  "created": "2026-01-01T00:00:00+00:00"}
        identity |= {k: v for k, v in changes.items() if k in identity}
        fields |= {k: v for k, v in changes.items() if k in fields}
        with library.building_folder() as folder:
            (folder / "model.onnx").write_bytes(b"x")
            library.publish(folder, Manifest(EngineIdentity(**identity), fields.pop("kind"), "m", (), (),
                                             describe_files(folder, ["model.onnx"]), **fields))

    for other in ({"kind": "other"}, {"backend": "another"}, {"device": "another"}, {"precision": "bfloat16"},
                  {"parameters": parameters * 5}, {"parameters": parameters // 5}, {"parameters": 0}):
        record(**other)
    assert expected_seconds(wanted, library) is None
    record()
    assert expected_seconds(wanted, library) == 4.0
    record(created="2026-02-01T00:00:00+00:00", parameters=parameters * 2, seconds={"export": 12.0})
    assert expected_seconds(wanted, library) == 6.0, "the latest decides, scaled by size"
