"""Locks on a folder of machines whose system's locks do not reach each other: one holder, until it is silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builds import backend, contents, order, pretend, queue, small_network, until
from hybrid_trt.engine_builder import resources
from hybrid_trt.engine_builder.build import build_engine
from hybrid_trt.engine_builder.jobs import BuildQueue, State
from hybrid_trt.engine_library import Library, Reason, Unavailable, fleet_key, locks, trust
from hybrid_trt.engine_library.locks import FileLock
from hybrid_trt.engine_library.safe_files import sweep_temporaries
from machine import Machine

__all__ = ["backend", "queue"]  # fixtures: pytest finds them by name

SILENCE = 2.0
DAY = 86_400.0
WORKER = Path(__file__).parents[1] / "support" / "fleet_worker.py"
pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are stopped by POSIX signals")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made = []

    def start(name: str, ahead: float = 0.0) -> Machine:
        made.append(Machine(tmp_path, name, SILENCE, ahead))
        return made[-1]

    yield start
    for each in made:
        each.end()


def takes_over(machine: Machine, file: str) -> float:
    """Return the seconds until a machine has a lock that it asks for again and again."""
    began = time.monotonic()
    assert until(lambda: machine.ask(f"take {file}"), 60)
    return time.monotonic() - began


@pytest.mark.fault("two machines with wrong clocks begin the same build at the same moment",
                   see="one builds; the others: *another machine builds it*")
def test_of_machines_that_begin_at_once_one_has_the_lock_each_time(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    both = [machine("first", DAY), machine("second", -DAY)]
    for number in range(20):
        for each in both:
            each.tell(f"take {number}.lock")
        had = [each.reply() for each in both]
        assert sorted(had) == [False, True], number
        loser, winner = (both[had.index(which)] for which in (False, True))
        assert loser.ask("elsewhere")
        assert not winner.ask("lost")
        winner.ask("give")
        assert loser.ask(f"take {number}.lock"), "it is free at once"
        loser.ask("give")
    assert contents(tmp_path) == []


@pytest.mark.fault("a machine that builds dies, while others have wrong clocks",
                   see="another one builds after 40 seconds")
def test_a_lock_goes_over_when_its_machine_dies_and_not_before(machine: Callable[..., Machine]) -> None:
    first, second = machine("first"), machine("second", DAY)
    assert first.ask("take a.lock")
    alive = time.monotonic() + SILENCE * 2
    while time.monotonic() < alive:
        assert not second.ask("take a.lock")
    assert not first.ask("lost")
    first.signal(signal.SIGKILL)
    assert SILENCE * 0.8 <= takes_over(second, "a.lock") <= SILENCE * 5


@pytest.mark.fault("a machine that builds stands still, and goes on after another took its build over",
                   see="its build is thrown away: *another machine builds it*")
def test_a_machine_that_stood_still_notices_that_it_lost_and_leaves_the_new_holders_lock(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    first, second, third = machine("first"), machine("second"), machine("third")
    assert first.ask("take a.lock")
    first.signal(signal.SIGSTOP)
    takes_over(second, "a.lock")
    first.signal(signal.SIGCONT)
    assert first.ask("lost")
    first.ask("give")
    assert not second.ask("lost")
    assert not third.ask("take a.lock")
    second.ask("give")
    assert contents(tmp_path) == []
    assert first.ask("take a.lock")


def test_of_machines_that_take_over_at_once_one_is_left(machine: Callable[..., Machine]) -> None:
    dead, heirs = machine("dead"), [machine("first"), machine("second"), machine("third")]
    assert dead.ask("take a.lock")
    dead.signal(signal.SIGKILL)
    for each in heirs:
        assert not each.ask("take a.lock")
    time.sleep(SILENCE * 1.2)
    for each in heirs:
        each.tell("take a.lock")
    had = [each.reply() for each in heirs]
    assert sum(taken and not each.ask("lost") for taken, each in zip(had, heirs, strict=True)) == 1


@pytest.mark.fault("another machine sweeps the library while a build is under way",
                   see="nothing: it leaves the build alone")
def test_the_folder_of_a_build_is_swept_by_others_when_its_machine_is_dead_and_not_before(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    first, second = machine("first"), machine("second", DAY)
    folder = first.ask("folder")
    alive = time.monotonic() + SILENCE * 2
    while time.monotonic() < alive:
        assert second.ask("sweep") == []
        time.sleep(0.1)
    assert (tmp_path / folder / "half").is_file()
    first.signal(signal.SIGKILL)
    assert until(lambda: second.ask("sweep") == [folder], 60)
    assert contents(tmp_path) == []


def test_a_file_is_as_old_as_the_disk_says_not_this_machines_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".tmp-1-a").write_text("half")
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + DAY)
    sweep_temporaries(tmp_path)
    assert (tmp_path / ".tmp-1-a").exists()


def lock_name(root: Path, backend: object) -> str:
    """Return the lock file of the engine that the tests build."""
    made = build_engine(order(small_network(), backend), Library([root]), lambda *_: None, run=pretend)
    return f".{made.folder.name}.lock"


@pytest.mark.fault("another machine builds the engine",
                   see="normal speed: *another machine builds it*; the next run asks again")
def test_a_build_that_another_machine_does_is_left_to_it_and_taken_over_when_that_dies(
    machine: Callable[..., Machine], backend: object, queue: BuildQueue, tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(locks, "SILENCE", SILENCE)
    other, net = machine("other"), small_network()
    assert other.ask(f"take {lock_name(tmp_path_factory.mktemp('built'), backend)}")

    def job() -> object:
        done = queue.submit(order(net, backend), Library([tmp_path]), waits=True)
        assert done.wait(60)
        return done

    began = time.monotonic()
    left = job()
    assert time.monotonic() - began < 60, "nobody waits for it"
    assert (left.state, left.elsewhere) == (State.FAILED, True)
    assert left.message.startswith(f"another machine builds it: process {other.process.pid} on ")
    assert "Same picture, normal speed; nothing to do" in left.message
    other.signal(signal.SIGKILL)
    assert job().elsewhere, "nobody knows yet"
    time.sleep(SILENCE)
    assert job().state is State.DONE
    assert len(contents(tmp_path)) == 1


def test_a_build_whose_lock_another_machine_took_over_ends_and_publishes_nothing(
    machine: Callable[..., Machine], backend: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 600.0)  # as if this machine stood still
    monkeypatch.setattr(locks, "_kernel", lambda: "here")
    monkeypatch.setattr(resources, "LOOK", 0.0)
    other, library = machine("other"), Library([tmp_path])

    def run(task: dict, *rest: object) -> dict:
        if task["step"] == "build":
            (lock,) = (p.name for p in tmp_path.glob(".*.lock") if not p.name.startswith(locks.BUILD_PREFIX))
            takes_over(other, lock)
        return pretend(task, *rest)

    with pytest.raises(Unavailable) as ended:
        build_engine(order(small_network(), backend), library, lambda *_: None, run=run)
    assert ended.value.fallback.reason is Reason.BUILT_ELSEWHERE
    assert "took this build over" in ended.value.fallback.detail
    assert library.engines() == []
    other.ask("give")
    assert contents(tmp_path) == []


def test_a_lock_of_this_machine_needs_no_life_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SILENCE", 0.0)
    lock, other = FileLock(tmp_path / "a.lock"), FileLock(tmp_path / "a.lock")
    assert lock.acquire()
    for _ in range(3):
        assert not other.acquire()
        assert not other.is_elsewhere()
    lock.release()
    assert other.acquire()
    other.release()


@pytest.mark.slow
@pytest.mark.fault("a worker stands still in a build, and goes on when another one has built the engine",
                   see="nothing: there is one engine, and both use it")
@pytest.mark.parametrize("dies", [False, True], ids=["goes on", "is killed"])
def test_workers_get_one_valid_engine_when_the_first_stands_still_or_dies(tmp_path: Path, dies: bool) -> None:
    shared, key = tmp_path / "shared", tmp_path / "fleet.key"
    shared.mkdir()
    fleet_key.make(key)

    def start(name: str) -> subprocess.Popen[str]:
        environment = os.environ | {trust.FOLDER_VARIABLE: str(tmp_path / name), fleet_key.VARIABLE: str(key)}
        arguments = [str(WORKER), str(shared), "onnxruntime", "builds", name, str(SILENCE * 3)]
        return subprocess.Popen([sys.executable, "-P", *arguments], text=True, stdout=subprocess.PIPE, env=environment)

    first = start("first")
    assert until(lambda: list(shared.glob(f"{locks.BUILD_PREFIX}*/*")), 60)
    first.send_signal(signal.SIGKILL if dies else signal.SIGSTOP)
    done = [json.loads(start("second").communicate(timeout=120)[0].splitlines()[-1])]
    if not dies:
        assert len(contents(shared)) >= 2, "what the first one was building lies there"
        first.send_signal(signal.SIGCONT)
        done.append(json.loads(first.communicate(timeout=120)[0].splitlines()[-1]))
        assert done[1]["left"] == Reason.BUILT_ELSEWHERE.value
    first.wait()
    assert (done[0]["steps"], done[0]["left"]) == (["export"], "")
    for result in done:
        assert result["serving"]
        assert result["error"] <= 1e-5
    assert [path.name for path in shared.glob("*/manifest.json") if path.parent.name.startswith(".")] == []
    (engine,) = Library([shared]).engines()
    engine.check_contents()
