"""Building again: the engine that is there stays until the new one has its place, whatever happens in between."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest
from builds import contents, order, small_network
from fake_engine import publish_engine
from hybrid_trt.backends import backends
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_library import Library, LibraryError
from hybrid_trt.engine_library import library as library_module
from hybrid_trt.engine_library.disk import Settings, write_settings
from hybrid_trt.engine_library.engine import describe_files
from hybrid_trt.engine_library.locks import REPLACED, sweep
from windows_rules import windows_rules


def test_on_windows_a_scanner_that_holds_a_new_file_leaves_the_old_engine_in_its_place(tmp_path: Path) -> None:
    old, library, held = publish_engine(tmp_path, b"\x08old"), Library([tmp_path]), []
    with windows_rules(), library.building_folder() as work:
        (work / "model.onnx").write_bytes(b"\x08new")
        (work / "parameters.json").write_text("{}")
        manifest = dataclasses.replace(old.manifest, files=describe_files(work, ["model.onnx", "parameters.json"]))

        def scanner() -> None:
            if not held and (work / "manifest.json").exists():
                held.append((work / "model.onnx").open("rb"))

        try:
            with pytest.raises(OSError, match="in use"):
                library.publish(work, manifest, scanner)
        finally:
            held[0].close()
    assert contents(tmp_path) == [old.folder.name]
    assert (old.folder / "model.onnx").read_bytes() == b"\x08old"
    assert library.engines() == [old]


@pytest.mark.fault("a process is killed while it replaces an engine", see="nothing: the old engine comes back")
def test_an_engine_that_a_killed_process_had_put_aside_comes_back(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path)
    aside = tmp_path / ".building-1-x" / REPLACED
    aside.mkdir(parents=True)
    engine.folder.rename(aside / engine.folder.name)
    sweep(tmp_path)
    assert (contents(tmp_path), Library([tmp_path]).engines()) == ([engine.folder.name], [engine])

    aside.mkdir(parents=True)
    (aside / engine.folder.name).mkdir()
    sweep(tmp_path)
    assert Library([tmp_path]).engines() == [engine], "the new one had taken its place"
    assert contents(tmp_path) == [engine.folder.name]


def test_an_engine_that_cannot_go_back_waits_for_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, move = publish_engine(tmp_path), library_module.move

    def refuse(source: Path, target: Path) -> None:
        if target == engine.folder:
            raise PermissionError(errno.EACCES, "held")
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(library_module, "move", refuse)
        patch.setattr("hybrid_trt.engine_library.locks.move", refuse)
        with pytest.raises(PermissionError):
            publish_engine(tmp_path, b"\x08new")
        assert Library([tmp_path]).engines() == []
    sweep(tmp_path)
    assert Library([tmp_path]).engines() == [engine]


def test_the_limit_counts_the_engine_that_is_replaced_once(tmp_path: Path) -> None:
    backend = backends()["onnxruntime"]
    made, library = order(small_network(), backend), Library([tmp_path])
    engine = build_engine(made, library, lambda *_: None, run=run_here)
    write_settings(tmp_path, Settings(limit_gb=1.5 * engine.manifest.bytes / 1e9))
    assert build_engine(made, library, lambda *_: None, run=run_here, again=True).folder == engine.folder
    with pytest.raises(LibraryError, match="the settings allow"):
        library.check_limit(engine.manifest.bytes, "Another")


def test_two_names_of_one_folder_are_one(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert Library([tmp_path / "a", tmp_path / "b"]).roots == [tmp_path / "a"]
    assert Library([tmp_path / "a", tmp_path / "b"]).engines() == [engine]
