"""Locks between processes: one holder, whose name stands in the file whenever there is one; nothing stays behind."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from builds import contents
from hybrid_trt.engine_library import atomic_files
from hybrid_trt.engine_library.atomic_files import FileLock, sweep_temporaries, write_file

UNDER_WINDOWS_RULES_TOO = True


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


def test_one_of_many_gets_the_lock_and_the_last_leaves_nothing(tmp_path: Path) -> None:
    held, most, taken = 0, 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal held, most, taken
        for _ in range(50):
            lock = FileLock(tmp_path / "a.lock")
            if not lock.acquire():
                continue
            with guard:
                held, taken = held + 1, taken + 1
                most = max(most, held)
            with guard:
                held -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 10
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


@pytest.mark.fault("a lock is a link that leads nowhere")
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
    assert atomic_files.TEMPORARY == ".tmp-"
