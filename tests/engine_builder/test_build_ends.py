"""Builds that end before their time: cancelled, killed, a disk that runs full; nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builds import (
    PROMPTLY,
    backend,
    children,
    contents,
    gone,
    network,
    order,
    pretend,
    queue,
    read_only,
    small_disk,
    until,
)  # fmt: skip
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as build_module
from hybrid_trt.engine_builder import jobs as jobs_module
from hybrid_trt.engine_builder import resources, worker_process
from hybrid_trt.engine_builder.jobs import BuildQueue, State
from hybrid_trt.engine_builder.resources import TimeLimit
from hybrid_trt.engine_library import BuildError, Library, LibraryError
from hybrid_trt.engine_library.disk import Settings, write_settings
from windows_rules import windows_rules

__all__ = ["backend", "network", "queue"]  # fixtures: pytest finds them by name

PHASES = ["exporting", "slow: compiling"]
"""One of each of a build's two processes."""


@pytest.mark.fault("the system kills the builder", see="an error in one sentence; the next build succeeds")
@pytest.mark.parametrize("phase", PHASES)
def test_a_builder_that_is_killed_fails_the_job_and_the_next_one_succeeds(
    queue: BuildQueue, network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", "silence")
    library = Library([tmp_path])
    # the one that goes on to a whole build does so under the stricter rules
    with windows_rules() if phase == PHASES[-1] else nullcontext():
        job = queue.submit(order(network, backend), library)
        assert until(lambda: job.phase == phase or job.state.final, 60)
        assert job.state is State.RUNNING, job.message
        os.kill(children()[0].pid, signal.SIGKILL)
        assert job.wait(60)
        assert job.state is State.FAILED
        assert "SIGKILL" in job.message
        assert "the normal model keeps running" in job.message
        assert contents(tmp_path) == []
        if phase != PHASES[-1]:
            return
        monkeypatch.setenv("HYBRID_TRT_TEST_BUILD", "finish")
        again = queue.submit(order(network, backend), library)
        assert again.wait(60)
        assert again.state is State.DONE, again.message
        assert contents(tmp_path) == [again.engine.folder.name]
        third = queue.submit(order(network, backend), library)
        assert third.wait(60)
        assert third.engine == again.engine, "it is there and is not built again"


@pytest.mark.fault("a build takes longer than the settings allow", see="an error in one sentence")
@pytest.mark.parametrize("step", ["export", "build"])
def test_every_step_of_a_build_counts_as_its_time(
    network: NativeNetwork, backend: Any, tmp_path: Path, step: str
) -> None:
    def run(task: dict, progress: Any, *_: Any) -> dict:
        for _number in range(100 if task["step"] == step else 0):
            progress("working", 0.5)
            time.sleep(0.01)
        return pretend(task)

    write_settings(tmp_path, Settings(build_minutes=0.005))
    with pytest.raises(BuildError, match=r"longer than the 0.005 minutes .* normal model keeps running; raise"):
        build_module.build_engine(order(network, backend), Library([tmp_path]), lambda *_: None, run=run)
    assert contents(tmp_path) == []


def test_the_time_of_all_steps_is_added_and_that_between_them_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(resources, "time", SimpleNamespace(perf_counter=lambda: now))

    def run(_task: dict, progress: Any, *_: Any) -> dict:
        nonlocal now
        now += 10
        progress("working", 0.5)
        return {}

    limit = TimeLimit(25 / 60, "slow")
    kept = limit.kept_by(run)
    for _ in range(2):
        kept({"step": "check"}, lambda *_: None, print, {})
        now += 30
    with pytest.raises(BuildError, match="slow took longer"):
        kept({"step": "check"}, lambda *_: None, print, {})


@pytest.mark.fault("the builder is stopped and does nothing", see="an error in one sentence; the next build runs")
def test_a_builder_that_was_stopped_is_ended_and_the_next_build_runs(
    queue: BuildQueue, network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue.submit(order(network, backend), Library([tmp_path]))
    assert until(lambda: job.phase == "exporting" or job.state.final, 60)
    (process, *_) = children()
    process.suspend()
    monkeypatch.setattr(worker_process, "STILL", 1.0)
    monkeypatch.setattr(worker_process, "LOOK", 0.2)
    assert job.wait(60)
    assert job.state is State.FAILED
    assert "The builder did nothing for" in job.message
    assert "the normal model keeps running" in job.message
    assert gone([process], PROMPTLY)
    assert contents(tmp_path) == []
    monkeypatch.setattr(jobs_module, "build_engine", lambda *_, **__: None)
    after = queue.submit(order(network, backend), Library([tmp_path]))
    assert after.wait(60)
    assert after.state is State.DONE


def run_build(network: NativeNetwork, backend: Any, folder: Path) -> str:
    """The message of a build that has to fail."""
    with pytest.raises(LibraryError) as failed:
        build_module.build_engine(order(network, backend), Library([folder]), lambda *_: None)
    return str(failed.value)


@pytest.mark.fault("the disk has too little room for a build", see="an error in one sentence, before it starts")
def test_too_little_room_is_told_before_anything_is_done(
    network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_trt.engine_library.disk.free_bytes", lambda _: 1_000_000)
    message = run_build(network, backend, tmp_path)
    assert "Building the engine of small_1.safetensors needs about" in message
    assert "its disk has 1.0 MB free" in message
    assert "extra_model_paths.yaml" in message
    assert contents(tmp_path) == []


@pytest.mark.fault("the disk runs full during a build", see="an error in one sentence; nothing is left")
@pytest.mark.parametrize("weights_fit", [False, True], ids=["while reading weights", "while exporting"])
def test_a_disk_that_runs_full_is_told_and_left_clean(
    network: NativeNetwork, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights_fit: bool
) -> None:
    monkeypatch.setattr(build_module, "ROOM", 0)
    weights = sum(p.numel() * p.element_size() for p in network.module.parameters())
    with small_disk(tmp_path / "disk", weights // 1024 + 64 if weights_fit else 1024) as disk:
        message = run_build(network, backend, disk)
        assert "is full" in message
        assert "delete engines" in message
        assert contents(disk) == []
    assert children() == []


@pytest.mark.fault("the library is read-only", see="an error in one sentence")
def test_a_read_only_library_is_told(network: NativeNetwork, backend: Any, tmp_path: Path) -> None:
    with read_only(tmp_path / "library") as folder:
        message = run_build(network, backend, folder)
    assert "cannot be written" in message
    assert "give ComfyUI the right to write there" in message
