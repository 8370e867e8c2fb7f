"""Opening an engine: its files are hashed once per machine, and its last use is remembered."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pack
import pytest
from builds import read_only
from fake_engine import publish_engine

pack.import_comfy()

from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_library import Library, Unavailable, last_use, local_key, verified
from hybrid_trt.engine_library import engine as engine_module
from hybrid_trt.engine_library.inventory import entries


@pytest.fixture(autouse=True)
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files that were hashed, on a new machine."""
    names: list[str] = []
    real = engine_module.file_sha256

    def counted(path: Path, *arguments: object) -> str:
        names.append(path.name)
        return real(path, *arguments)

    monkeypatch.setattr(engine_module, "file_sha256", counted)
    monkeypatch.setenv(local_key.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(verified, "_here", {})
    monkeypatch.setattr(last_use, "_marked", {})
    return names


def restart() -> None:
    """Forget what a process remembers."""
    verified._here.clear()


def test_an_engine_is_hashed_once_per_machine_and_again_when_it_changed(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = publish_engine(tmp_path / "library", b"\x08engine" * 1000)
    hashed.clear()
    verified.check_contents(engine)
    assert sorted(hashed) == ["model.onnx", "parameters.json"]
    for _ in range(2):
        restart()
        verified.check_contents(engine)
    assert len(hashed) == 2, "no start reads it again"
    stat = engine.main_file.stat()
    engine.main_file.write_bytes(b"\x08ENGINE" * 1000)
    os.utime(engine.main_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        restart()
        with pytest.raises(Unavailable, match="its hash differs"):
            verified.check_contents(engine)
    engine.main_file.write_bytes(b"\x08engine" * 1000)
    verified.check_contents(engine)
    hashed.clear()
    restart()
    monkeypatch.setenv(local_key.FOLDER_VARIABLE, str(tmp_path / "another machine"))
    verified.check_contents(engine)
    assert len(hashed) == 2


def test_gigabytes_open_in_no_time_when_warm(tmp_path: Path) -> None:
    """2 GB of zeros that take no disk; sizes do not matter when nothing is read."""
    engine = publish_engine(tmp_path)
    os.truncate(engine.main_file, 2 << 30)
    verified.remember(engine)
    restart()
    began = time.perf_counter()
    verified.check_contents(engine)
    assert time.perf_counter() - began < 0.1


def test_a_use_is_remembered_once_a_minute_and_costs_nothing_where_it_cannot_be(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path / "library")
    assert last_use.last_used(engine) is None
    last_use.mark([engine])
    assert datetime.now(timezone.utc) - last_use.last_used(engine) < timedelta(seconds=10)
    path = engine.folder / "last_used"
    os.utime(path, (1000, 1000))
    last_use.mark([engine])
    assert path.stat().st_mtime == 1000, "within a minute"
    path.unlink()  # the engine was deleted, and came back
    last_use.mark([engine])
    assert path.exists()
    last_use._marked.clear()
    last_use.mark([engine])
    assert path.stat().st_mtime > 1000
    last_use._marked.clear()
    with read_only(tmp_path / "library"):
        last_use.mark([engine])
    (entry,) = entries(Library([tmp_path / "library"]), lambda _: None, source_changed)
    assert entry.to_json()["last_used"] == last_use.last_used(engine).isoformat(timespec="seconds")
