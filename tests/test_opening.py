"""Cost of opening an engine: hashed once per machine; and its use: a time of last use."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from builds import read_only
from fake_engine import publish_engine
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_library import Library, Unavailable, inventory, trust
from hybrid_trt.engine_library import engine as engine_module
from hybrid_trt.engine_library.inventory import entries


@pytest.fixture(autouse=True)
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were hashed; the machine is a new one."""
    names: list[str] = []
    real = engine_module.file_sha256

    def counted(path: Path, *arguments: object) -> str:
        names.append(path.name)
        return real(path, *arguments)

    monkeypatch.setattr(engine_module, "file_sha256", counted)
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(trust, "_hashed", {})
    monkeypatch.setattr(inventory, "_marked", {})
    return names


def restart() -> None:
    """Forget what the process remembers."""
    trust._hashed.clear()


def test_an_engine_is_hashed_once_per_machine_and_again_when_it_changed(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = publish_engine(tmp_path / "library", b"\x08engine" * 1000)
    hashed.clear()
    trust.check_contents(engine)
    assert sorted(hashed) == ["model.onnx", "parameters.json"]
    for _ in range(2):
        restart()
        trust.check_contents(engine)
    assert len(hashed) == 2, "no start reads it again"
    stat = engine.main_file.stat()
    engine.main_file.write_bytes(b"\x08ENGINE" * 1000)
    os.utime(engine.main_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        restart()
        with pytest.raises(Unavailable, match="its hash differs"):
            trust.check_contents(engine)
    engine.main_file.write_bytes(b"\x08engine" * 1000)
    trust.check_contents(engine)
    hashed.clear()
    restart()
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "another machine"))
    trust.check_contents(engine)
    assert len(hashed) == 2


def test_gigabytes_open_in_no_time_when_warm(tmp_path: Path) -> None:
    """2 GB of zeros that take no disk; sizes do not matter when nothing is read."""
    engine = publish_engine(tmp_path)
    os.truncate(engine.main_file, 2 << 30)
    trust.remember_contents(engine)
    restart()
    began = time.perf_counter()
    trust.check_contents(engine)
    assert time.perf_counter() - began < 0.1


def test_a_use_is_remembered_once_a_minute_and_costs_nothing_where_it_cannot_be(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path / "library")
    assert inventory.last_used(engine) is None
    inventory.mark_used([engine])
    assert datetime.now(timezone.utc) - inventory.last_used(engine) < timedelta(seconds=10)
    path = engine.folder / "last_used"
    os.utime(path, (1000, 1000))
    inventory.mark_used([engine])
    assert path.stat().st_mtime == 1000, "within a minute"
    path.unlink()  # the engine was deleted, and came back
    inventory.mark_used([engine])
    assert path.exists()
    inventory._marked.clear()
    inventory.mark_used([engine])
    assert path.stat().st_mtime > 1000
    inventory._marked.clear()
    with read_only(tmp_path / "library"):
        inventory.mark_used([engine])
    (entry,) = entries(Library([tmp_path / "library"]), lambda _: None, source_changed)
    assert entry.to_json()["last_used"] == inventory.last_used(engine).isoformat(timespec="seconds")
