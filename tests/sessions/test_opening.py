"""Opening an engine: files that are not its own, memory that is short; and its use: a time of last use."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from builds import read_only
from comfy import model_management
from fake_engine import publish_engine
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_library import Library, Unavailable, inventory, trust
from hybrid_trt.engine_library.inventory import entries
from hybrid_trt.sessions.file_session import FileSession


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one."""
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(inventory, "_marked", {})


@pytest.mark.fault("more files lie in an engine's folder than were built", see="nothing: they are not opened")
@pytest.mark.parametrize("name", ["manifest.json", "../model.onnx", "other"])
def test_what_the_manifest_does_not_name_is_not_opened(tmp_path: Path, name: str) -> None:
    engine = publish_engine(tmp_path)
    with pytest.raises(Unavailable, match="has no file"):
        engine.read_checked(name)


@pytest.mark.fault("an engine does not fit into main memory when it is opened", see="normal speed: *engine failed*")
def test_without_the_memory_to_read_it_an_engine_is_not_opened_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_management, "get_free_memory", lambda *_: 5)
    session = FileSession(publish_engine(tmp_path), lambda *_: pytest.fail("it was opened"), torch.device("cpu"))
    with pytest.raises(Unavailable, match="of main memory, and 0.0 MB are free") as refused:
        session.load()
    assert "close other programs" in refused.value.fallback.sentence()


def test_a_use_is_remembered_once_a_minute_and_costs_nothing_where_it_cannot_be(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path / "library")
    assert inventory.last_used(engine) is None
    inventory.mark_used([engine])
    assert datetime.now(timezone.utc) - inventory.last_used(engine) < timedelta(seconds=60)
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
