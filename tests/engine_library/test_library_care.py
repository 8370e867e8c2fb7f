"""Looking after engines: states, verify, delete, one file to carry them, leftovers, locks, hashes kept on disk."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from builds import contents, main_file, read_only
from fake_engine import publish_engine as publish
from hybrid_trt.comfy_model import hash_cache
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_builder.command_line.comfyui import library_folders
from hybrid_trt.engine_library import Fallback, Library, LibraryError, Manifest, Reason
from hybrid_trt.engine_library.disk import Settings, read_settings, write_settings
from hybrid_trt.engine_library.inventory import BROKEN, READY, STALE, delete, entries, select, verify
from hybrid_trt.engine_library.locks import REPLACED, FileLock, sweep, work_folder

UNDER_WINDOWS_RULES_TOO = True
def states(folder: Path, usable: Callable[[Manifest], Fallback | None] = lambda _: None) -> dict[str, tuple[str, str]]:
    found = entries(Library([folder]), usable, source_changed)
    return {entry.folder.name: (entry.state, entry.reason) for entry in found}


def test_ready_stale_and_broken_engines_are_told_apart(tmp_path: Path) -> None:
    ready = publish(tmp_path).folder.name
    old = publish(tmp_path, export_format=0).folder.name
    other_version = publish(tmp_path, backend="tensorrt", backend_version="10.0").folder.name
    other_gpu = publish(tmp_path, backend="tensorrt", device="sm_89").folder.name
    cut = publish(tmp_path, weights="b" * 64).folder
    (cut / "model.onnx").write_bytes(b"")
    unreadable = publish(tmp_path, weights="c" * 64).folder
    (unreadable / "manifest.json").write_text("{")

    def usable(manifest: Manifest) -> Fallback | None:
        if manifest.identity.device == "sm_89":
            return Fallback(Reason.WRONG_GPU, "built for sm_89, this GPU is sm_90")
        if manifest.identity.backend_version == "10.0":
            return Fallback(Reason.STALE_ENGINE, "built with TensorRT 10.0, 11.1 is installed")
        return None

    found = states(tmp_path, usable)
    assert found[ready] == (READY, "")
    assert found[old][0] == found[other_version][0] == found[other_gpu][0] == STALE
    assert "export format 0" in found[old][1]
    assert "TensorRT 10.0" in found[other_version][1]
    assert "sm_89" in found[other_gpu][1]
    assert found[cut.name][0] == found[unreadable.name][0] == BROKEN
    assert "0 bytes" in found[cut.name][1]
    assert "cannot be read" in found[unreadable.name][1]


def test_the_same_engine_in_two_folders_is_two_each_with_a_name_of_its_own(tmp_path: Path) -> None:
    """As after a copy to a faster drive that extra_model_paths.yaml names first."""
    fast, slow = publish(tmp_path / "fast").folder, publish(tmp_path / "slow").folder
    assert fast.name == slow.name
    (fast / "model.onnx").write_bytes(b"damaged")
    library = Library([tmp_path / "fast", tmp_path / "slow"])
    found = entries(library, lambda _: None, source_changed)
    names = [entry.name for entry in found]
    assert names == [fast.name, f"{fast.name}@2"]
    assert [select(found, name).folder for name in names] == [fast, slow]
    assert {entry.name: verify(entry) is None for entry in found} == {names[0]: False, names[1]: True}
    delete(select(found, names[1]))
    assert fast.is_dir()
    assert not slow.exists()


@pytest.mark.fault("a checkpoint is overwritten by another one of its name",
                   see="normal speed: *no engine*; the panel calls the engine stale")
def test_an_engine_whose_checkpoint_was_overwritten_is_stale(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.safetensors"
    checkpoint.write_bytes(b"weights")
    stat = checkpoint.stat()
    source = {"path": str(checkpoint), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    name = publish(tmp_path / "library", source=source).folder.name
    assert states(tmp_path / "library")[name] == (READY, "")
    checkpoint.write_bytes(b"other weights")
    state, reason = states(tmp_path / "library")[name]
    assert state == STALE
    assert "has changed since" in reason
    checkpoint.unlink()
    assert states(tmp_path / "library")[name] == (READY, ""), "a missing file proves nothing"


def test_an_engine_with_a_lora_built_in_is_no_staler_than_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was copied back from a backup: the same contents under another time."""
    monkeypatch.setattr(hash_cache, "_folder", tmp_path)
    checkpoint, found = tmp_path / "a.safetensors", []
    checkpoint.write_bytes(b"weights")

    def now() -> dict:
        stat = checkpoint.stat()
        return {"path": str(checkpoint), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}

    def hashed(value: str) -> None:
        hash_cache.write(json.dumps([now(), "load", "()"]), value)

    hashed("a" * 64)
    for weights in ("a" * 64, "b" * 64):  # b: with a LoRA
        found.append(publish(tmp_path / "library", weights=weights, source=now()).folder.name)
    os.utime(checkpoint, (1, 1))
    assert [states(tmp_path / "library")[name][0] for name in found] == [STALE, STALE], "nobody has looked yet"
    hashed("a" * 64)
    assert [states(tmp_path / "library")[name][0] for name in found] == [READY, READY]
    os.utime(checkpoint, (2, 2))
    hashed("c" * 64)
    assert [states(tmp_path / "library")[name][0] for name in found] == [STALE, STALE]


@pytest.mark.fault("a backend fails when it is asked about an engine of the list",
                   see="that engine is *broken*, with the error; the others are listed")
def test_an_engine_that_cannot_be_looked_at_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [publish(tmp_path, weights=letter * 64).folder.name for letter in "abc"]

    def usable(manifest: Manifest) -> Fallback | None:
        if manifest.identity.weights == "b" * 64:
            raise RuntimeError("the driver is gone")
        return None

    found = states(tmp_path, usable)
    assert set(found) == set(names)
    assert [found[name][0] for name in names] == [READY, BROKEN, READY]
    assert "could not be looked at (RuntimeError: the driver is gone)" in found[names[1]][1]
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.fault("an engine is deleted while the list of engines is made", see="the others are listed")
def test_an_engine_that_goes_while_it_is_listed_does_not_hide_the_others(tmp_path: Path, system: str) -> None:
    gone, stays = publish(tmp_path), publish(tmp_path, weights="b" * 64)

    def usable(manifest: Manifest) -> Fallback | None:
        shutil.rmtree(gone.folder, ignore_errors=True)
        return None

    assert states(tmp_path, usable)[stays.folder.name] == (READY, "")


def test_disk_use_counts_everything_in_the_folder(tmp_path: Path) -> None:
    engine = publish(tmp_path, b"x" * 1000)
    (engine.folder / "runtime.cache").write_bytes(b"y" * 500)
    (entry,) = entries(Library([tmp_path]), lambda _: None, source_changed)
    assert entry.bytes == sum(p.stat().st_size for p in engine.folder.iterdir())
    assert entry.bytes > 1500
    assert entry.to_json()["key"] == engine.manifest.identity.key


@pytest.mark.fault("an engine is to be deleted from a read-only library", see="an error in one sentence")
def test_deleting_from_a_read_only_library_is_told(tmp_path: Path) -> None:
    publish(tmp_path / "library")
    (entry,) = entries(Library([tmp_path / "library"]), lambda _: None, source_changed)
    with read_only(tmp_path / "library"):
        with pytest.raises(LibraryError, match="cannot be written"):
            delete(entry)
        assert verify(entry) is None, "reading works"


@pytest.mark.fault("an engine in use is deleted", see="it is gone, or whole with an error in one sentence")
def test_an_engine_in_use_is_deleted_or_left_whole(tmp_path: Path, system: str) -> None:
    engine = publish(tmp_path)
    (entry,) = entries(Library([tmp_path]), lambda _: None, source_changed)
    with main_file(engine).open("rb"):
        if system == "windows":
            with pytest.raises(LibraryError, match="one of its files is in use"):
                delete(entry)
            with pytest.raises(PermissionError):
                publish(tmp_path)
            assert verify(entry) is None
        else:
            delete(entry)
    assert [name for name in contents(tmp_path) if not name.startswith(".building")] == (
        [engine.folder.name] if system == "windows" else []
    )


def test_an_engine_is_named_by_folder_key_or_the_start_of_either(tmp_path: Path) -> None:
    one, other = publish(tmp_path), publish(tmp_path, weights="b" * 64)
    found = entries(Library([tmp_path]), lambda _: None, source_changed)
    for name in (one.folder.name, one.folder.name[:-2], one.manifest.identity.key[:10]):
        assert select(found, name).folder == one.folder
    with pytest.raises(LibraryError, match=f"could be any of .*{other.folder.name}"):
        select(found, "sd15_unet")
    with pytest.raises(LibraryError, match="no engine is called 'x'"):
        select(found, "x")


HOLDER = """
import sys, time
sys.path[:0] = [{support!r}, {tools!r}]
import pack
from pathlib import Path
from hybrid_trt.engine_library.locks import FileLock, work_folder
assert FileLock(Path({folder!r}) / "a.lock").acquire()
with work_folder(Path({folder!r})) as folder:
    (folder / "half").write_text("an engine")
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.fault("a killed process left its locks", see="nothing: they are free at once")
def test_locks_and_leftovers_of_a_killed_process_are_free_at_once(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    code = HOLDER.format(support=str(tests / "support"), tools=str(tests.parent / "tools"), folder=str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().strip() == "held"
        lock = FileLock(tmp_path / "a.lock")
        with work_folder(tmp_path):
            assert not lock.acquire()
            assert f"process {holder.pid} on" in lock.holder()
            assert sweep(tmp_path) == [], "both processes live"
    finally:
        holder.kill()
        holder.wait()
    assert lock.acquire(), "nobody holds the file that is left"
    lock.release()
    (swept,) = sweep(tmp_path)
    assert str(holder.pid) in swept
    assert contents(tmp_path) == []


@pytest.mark.fault("a kill left a half-built engine in a second folder of the library", see="nothing: it is swept")
def test_leftovers_are_swept_in_every_folder_of_the_library(tmp_path: Path) -> None:
    """A delete in a second folder leaves one there when it is killed."""
    roots = [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        (root / ".building-1-x").mkdir(parents=True)
        (root / ".building-1-x" / "model.onnx").write_text("half")
    library = Library(roots)
    with library.building_folder():
        pass
    assert [contents(root) for root in roots] == [[], []]


@pytest.mark.fault("a leftover is a link to somebody's folder", see="nothing: the folder is untouched")
def test_nothing_is_swept_by_way_of_a_link(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / REPLACED / "an engine").mkdir(parents=True)
    library = tmp_path / "library"
    library.mkdir()
    (library / ".building-1-x").symlink_to(theirs)
    sweep(library)
    assert (theirs / REPLACED / "an engine").is_dir()
    assert not (library / "an engine").exists()


@pytest.mark.fault("an engine lies in a hidden folder", see="normal speed: *no engine*")
@pytest.mark.parametrize("name", [".hidden", "..b", ".building-of-mine"])
def test_what_is_listed_nowhere_serves_nowhere(tmp_path: Path, name: str) -> None:
    engine = publish(tmp_path)
    assert (len(entries(Library([tmp_path]), lambda _: None, source_changed)), len(Library([tmp_path]).engines())) == (
        1, 1)  # fmt: skip
    engine.folder.rename(tmp_path / name)
    assert entries(Library([tmp_path]), lambda _: None, source_changed) == Library([tmp_path]).engines() == []


@pytest.mark.fault("others may write to the library", see="a warning")
@pytest.mark.skipif(os.name == "nt", reason="rights are those of POSIX")
@pytest.mark.parametrize(("mode", "owner", "warned"), [
    (0o755, "own", False), (0o775, "own", False), (0o777, "own", True), (0o757, "own", True), (0o1777, "own", True),
    (0o755, "another", True),
])  # fmt: skip
def test_a_library_that_others_may_write_is_told_once(
    tmp_path: Path, mode: int, owner: str, warned: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    root = tmp_path / "library"
    root.mkdir()
    root.chmod(mode)
    if owner == "another":
        if (me := os.geteuid()) == 0:
            os.chown(root, 12345, -1)
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    for _ in range(2):
        Library([root])
    warnings = [record.message for record in caplog.records if "other users may write" in record.message]
    assert len(warnings) == (1 if warned else 0)
    assert all(str(root) in text for text in warnings)


def test_folders_of_the_user_come_before_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Builds go to the first folder. ComfyUI reads extra_model_paths.yaml before it loads packs."""
    import folder_paths

    own, users = str(Path(folder_paths.models_dir) / "trt_engines"), str(tmp_path / "elsewhere")
    for configured, found in (([users], [users, own]), ([], [own])):
        monkeypatch.setitem(folder_paths.folder_names_and_paths, "trt_engines", (list(configured), set()))
        assert library_folders() == [Path(folder) for folder in found]


def test_the_limit_counts_what_is_there(tmp_path: Path) -> None:
    library = Library([tmp_path])
    library.check_limit(10**15, "It")  # no settings, no limit
    write_settings(tmp_path, Settings(1e-6))
    library.check_limit(1000, "It")
    publish(tmp_path, b"x" * 600)
    used = library.engines()[0].manifest.bytes
    library.check_limit(1000 - used, "It")
    with pytest.raises(LibraryError, match=r"It needs about .* settings allow .* the normal model keeps running"):
        library.check_limit(1001 - used, "It")
    (tmp_path / ".settings.json").write_text("{")
    assert read_settings(tmp_path) == Settings()


@pytest.mark.fault("the library's drive is gone when an engine is to be built or listed",
                   see="an error in one sentence")
def test_a_library_whose_drive_is_gone_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows there is no such drive then, all the way up."""
    from hybrid_trt.page_api import panel_routes

    def gone(folder: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "The system cannot find the path specified", str(folder))

    monkeypatch.setattr(shutil, "disk_usage", gone)
    monkeypatch.setattr(panel_routes, "library", lambda: Library([tmp_path / "library"]))
    answer = asyncio.run(panel_routes._list(SimpleNamespace(headers={})))
    assert answer.status == 409
    assert re.match("The library could not be used .*cannot find the path", json.loads(answer.text)["error"])


@pytest.mark.fault("settings cannot be written", see="an error in one sentence")
def test_settings_that_cannot_be_written_are_refused_with_a_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(LibraryError, match="could not be used"):
        write_settings(blocked, Settings(1.0))
