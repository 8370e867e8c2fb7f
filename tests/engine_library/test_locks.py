"""Locks between processes: one holder, whose name stands in the file whenever there is one; nothing stays behind."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
from builds import contents
from hybrid_trt.engine_library import locks
from hybrid_trt.engine_library.locks import FileLock, sweep
from hybrid_trt.engine_library.safe_files import sweep_temporaries, write_file

UNDER_WINDOWS_RULES_TOO = True

ENOUGH = 50
"""Times that a lock is taken while others want it too."""


def test_a_lock_file_appears_with_its_holder_in_it(tmp_path: Path) -> None:
    """Also when a dead holder left one behind: then one name or the other stands in it."""
    path = tmp_path / "a.lock"
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            lock = FileLock(path)
            if lock.acquire():
                lock.release()

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = 0
    try:
        for _ in range(20_000):
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                continue
            assert json.loads(text)["pid"] == os.getpid()
            seen += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert seen > 10


def most_holders(path: Path, keep: bool) -> int:
    """Return how many of several threads held a lock at once, while they took and gave it back again and again."""
    held, most, taken = 0, 0, 0
    guard, deadline = threading.Lock(), time.monotonic() + 60

    def work() -> None:
        nonlocal held, most, taken
        while taken < ENOUGH and time.monotonic() < deadline:
            lock = FileLock(path)
            if not lock.acquire():
                continue
            with guard:
                held, taken = held + 1, taken + 1
                most = max(most, held)
            time.sleep(0.0005)
            with guard:
                held -= 1
            lock.release(keep)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken >= ENOUGH
    return most


def test_one_of_many_gets_the_lock_and_the_last_leaves_nothing(tmp_path: Path) -> None:
    assert most_holders(tmp_path / "a.lock", keep=False) == 1
    last = FileLock(tmp_path / "a.lock")
    assert last.acquire()
    last.release()
    assert contents(tmp_path) == []


def test_a_lock_that_was_left_behind_is_taken_over_with_a_new_name_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.write_text(json.dumps({"pid": 1, "host": "dead"}) + " " * 700)
    lock = FileLock(path)
    assert lock.acquire()
    assert lock.holder().startswith(f"process {os.getpid()} on ")
    assert not FileLock(path).acquire()
    lock.release()


@pytest.mark.fault("a lock file is nested brackets or other nonsense", see="nothing: the lock is free")
@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b'{"lock": NaN}', b"\xff" * 3000],
                         ids=["lists", "objects", "no JSON", "no text"])  # fmt: skip
def test_a_lock_of_any_text_is_free_and_is_whole_once_it_is_held(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.write_bytes(text)
    lock = FileLock(path)
    assert lock.holder() == "another process"
    assert not lock.is_elsewhere()
    assert lock.acquire()
    assert lock.holder().startswith(f"process {os.getpid()} on ")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["reach"] == locks._reach(path), "another machine sees who has it"
    lock.release()
    assert contents(tmp_path) == []


def test_a_disk_without_links_still_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "rename" if system == "windows" else "link", no_links)
    lock = FileLock(tmp_path / "a.lock")
    assert lock.acquire()
    assert lock.holder().startswith(f"process {os.getpid()} on ")
    assert not FileLock(tmp_path / "a.lock").acquire()
    lock.release()
    assert contents(tmp_path) == []


@pytest.mark.fault("a lock is a link that leads nowhere", see="an error in one sentence")
def test_a_lock_that_leads_nowhere_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    (tmp_path / "a.lock").symlink_to(tmp_path / "none" / "x")
    with pytest.raises(OSError, match="neither opened nor made|is no regular file"):
        FileLock(tmp_path / "a.lock").acquire()


def test_a_file_that_is_being_read_is_replaced_when_its_reader_lets_go(tmp_path: Path, system: str) -> None:
    path = tmp_path / "a.json"
    write_file(path, "old")
    reader = path.open()
    timer = threading.Timer(0.1, reader.close)
    timer.start()
    write_file(path, "new", durable=True)
    timer.join()
    assert path.read_text() == "new"
    if system == "windows":
        with path.open(), pytest.raises(PermissionError):
            write_file(path, "newer")
    assert contents(tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_half_written_files_are_swept_when_they_are_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".tmp-1-a", tmp_path / ".tmp-2-b"
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (1, 1))
    sweep_temporaries(tmp_path)
    assert not old.exists()
    assert young.exists()


@pytest.mark.fault("killed builds left the locks of their engines in the library",
                   see="they are swept at the next start or build")
def test_locks_of_dead_builders_are_swept_and_never_one_that_is_held_or_of_others(tmp_path: Path) -> None:
    left, held = FileLock(tmp_path / ".left.lock"), FileLock(tmp_path / ".held.lock")
    assert left.acquire()
    left.release(keep=True)  # as a kill leaves it
    foreign = tmp_path / ".foreign.lock"
    foreign.write_text("of another program")
    (tmp_path / ".link.lock").symlink_to(foreign)
    (tmp_path / ".folder.lock").mkdir()
    assert held.acquire()
    there = {path.name for path in tmp_path.iterdir()}
    assert sweep(tmp_path) == [], "no engine was half built"
    assert {path.name for path in tmp_path.iterdir()} == there - {".left.lock"}
    assert not FileLock(held.path).acquire(), "its holder still has it"
    assert foreign.read_text() == "of another program"
    held.release()


def test_where_nothing_locks_no_engines_lock_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    held = FileLock(tmp_path / ".held.lock")
    monkeypatch.setattr(locks, "_system_lock", cannot)
    assert held.acquire()
    sweep(tmp_path)
    assert held.path.is_file()
    held.release()
    assert not held.path.exists()


def test_builders_that_meet_a_sweep_never_hold_an_engines_lock_together(tmp_path: Path) -> None:
    """A sweep removes a file that a builder has opened and not locked yet. It is never in the way for good."""
    stop = threading.Event()

    def care() -> None:
        while not stop.is_set():
            sweep(tmp_path)

    sweeper = threading.Thread(target=care)
    sweeper.start()
    try:
        assert most_holders(tmp_path / ".engine.lock", keep=True) == 1, "as a kill leaves it"
    finally:
        stop.set()
        sweeper.join()
    sweep(tmp_path)
    assert not (tmp_path / ".engine.lock").exists()
