"""One file that carries an engine to another machine: what arrives, and all that is refused."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import contents
from fake_engine import publish_engine as publish
from hybrid_trt.engine_library import Library, LibraryError, Unavailable
from hybrid_trt.engine_library.archive import export_engine, import_engine, manifest_of
from hybrid_trt.engine_library.settings import Settings, write_settings

UNDER_WINDOWS_RULES_TOO = True


def test_an_exported_engine_is_imported_as_it_was(tmp_path: Path) -> None:
    engine = publish(tmp_path / "one", os.urandom(10_000))
    file = export_engine(engine, tmp_path)
    assert file.name == engine.folder.name + ".trtengine"
    assert manifest_of(file) == engine.manifest
    imported = import_engine(Library([tmp_path / "other"]), file)
    assert imported.manifest == engine.manifest
    assert imported.main_file.read_bytes() == engine.main_file.read_bytes()
    import_engine(Library([tmp_path / "other"]), file)
    assert contents(tmp_path / "other") == [engine.folder.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["one", "other", file.name])


def test_a_damaged_engine_is_not_exported(tmp_path: Path) -> None:
    engine = publish(tmp_path / "one")
    engine.main_file.write_bytes(b"\x08ENGINE")
    with pytest.raises(Unavailable, match="damaged"):
        export_engine(engine, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def repack(file: Path, change: Callable[[dict[str, bytes]], object], compression: int = zipfile.ZIP_STORED) -> None:
    """Rewrite an engine's file with other contents."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def in_manifest(change: Callable[[dict], object]) -> Callable[[dict[str, bytes]], None]:
    def edit(members: dict[str, bytes]) -> None:
        data = json.loads(members["manifest.json"])
        change(data)
        members["manifest.json"] = json.dumps(data).encode()

    return edit


def rename_file(new: str) -> Callable[[dict[str, bytes]], None]:
    def edit(members: dict[str, bytes]) -> None:
        members[new] = members.pop("model.onnx")
        in_manifest(lambda d: d["files"].update({new: d["files"].pop("model.onnx")}))(members)

    return edit


REFUSED: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "another_file": (lambda m: m.update({"x.txt": b"x"}), "not those that its manifest names"),
    "a_file_missing": (lambda m: m.pop("model.onnx"), "not those that its manifest names"),
    "path_above": (lambda m: m.update({"../x": b"x"}), "outside of the engine's folder"),
    "absolute_path": (lambda m: m.update({"/tmp/x": b"x"}), "outside of the engine's folder"),
    "windows_path": (lambda m: m.update({"..\\x": b"x"}), "outside of the engine's folder"),
    "sub_folder": (rename_file("sub/model.onnx"), "outside"),
    "no_manifest": (lambda m: m.pop("manifest.json"), "no manifest.json"),
    "manifest_garbage": (lambda m: m.update({"manifest.json": b"{"}), "cannot be read"),
    "manifest_edited": (in_manifest(lambda d: d["identity"].update(precision="float32")), "changed after the build"),
    "other_size": (lambda m: m.update({"model.onnx": b"\x08engine2"}), "does not have the size"),
    "other_contents": (lambda m: m.update({"model.onnx": b"\x08ENGINE"}), "its hash differs"),
    "pickle_by_name": (rename_file("model.pt"), "may contain a program"),
    "library_by_name": (rename_file("model.so"), "may contain a program"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_not_what_it_says_is_refused(
    tmp_path: Path, change: Callable[[dict[str, bytes]], object], says: str
) -> None:
    file = export_engine(publish(tmp_path / "one"), tmp_path)
    repack(file, change)
    with pytest.raises(LibraryError, match=says):
        import_engine(Library([tmp_path / "other"]), file)
    assert not (tmp_path / "other").exists() or contents(tmp_path / "other") == []
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "other") == sorted(["one", file.name])


@pytest.mark.parametrize("start", [b"\x80\x04\x95", b"\x80\x02}", b"PK\x03\x04", b"\x7fELF"])
def test_a_pickle_or_program_under_another_name_is_refused(tmp_path: Path, start: bytes) -> None:
    file = export_engine(publish(tmp_path / "one", start + b"x" * 100), tmp_path)
    with pytest.raises(LibraryError, match="like a program or a pickle"):
        import_engine(Library([tmp_path / "other"]), file)
    assert contents(tmp_path / "other") == []


@pytest.mark.parametrize("name", ["B2-H64-W64.bin", "engine.trt"])
def test_an_engine_of_compiled_programs_is_not_exported(tmp_path: Path, name: str) -> None:
    with pytest.raises(LibraryError, match=r"compiled programs, which no other machine would open. Build it there"):
        export_engine(publish(tmp_path / "one", name=name), tmp_path)
    assert not list(tmp_path.glob("*.trtengine"))


def test_other_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    file = export_engine(publish(tmp_path / "one"), tmp_path)
    cut = tmp_path / "cut.trtengine"
    cut.write_bytes(file.read_bytes()[:-100])
    old = export_engine(publish(tmp_path / "old", export_format=0), tmp_path)
    packed = tmp_path / "packed.trtengine"
    packed.write_bytes(file.read_bytes())
    repack(packed, lambda _: None, zipfile.ZIP_DEFLATED)
    for source, says in ((cut, "damaged or not an engine's"), (tmp_path / "none", "there is no file"),
                         (old, "export format 0"), (packed, "compressed")):
        with pytest.raises(LibraryError, match=says):
            import_engine(Library([tmp_path / "other"]), source)




def test_an_engine_that_is_imported_in_the_place_of_its_like_is_not_counted_twice(tmp_path: Path) -> None:
    engine = publish(tmp_path / "library", b"x" * 600)
    file = export_engine(engine, tmp_path)
    write_settings(tmp_path / "library", Settings(1e-6))
    assert import_engine(Library([tmp_path / "library"]), file).folder == engine.folder
    write_settings(tmp_path / "library", Settings(1e-7))
    with pytest.raises(LibraryError, match="the engines take 0.0 MB, and the settings allow"):
        import_engine(Library([tmp_path / "library"]), file)


def test_where_an_engine_cannot_be_written_is_no_library_and_is_told(tmp_path: Path) -> None:
    engine = publish(tmp_path / "library")
    with pytest.raises(LibraryError) as refused:
        export_engine(engine, tmp_path / "no such folder" / "it.trtengine")
    told = str(refused.value)
    assert "was not exported" in told
    assert str(tmp_path / "no such folder") in told
    assert "the library" not in told
