"""Looking after engines: states, verify, delete, one file to carry them, leftovers, locks, hashes kept on disk."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pack
import pytest
from builds import contents, read_only, small_network
from hybrid_trt.architectures.tensors import Profile, Range, TensorSpec
from hybrid_trt.engine_library import (
    Engine,
    EngineIdentity,
    Fallback,
    Library,
    LibraryError,
    Manifest,
    Reason,
    Unavailable,
    hash_cache,
    weights,
)
from hybrid_trt.engine_library.archive import export_engine, import_engine, manifest_of
from hybrid_trt.engine_library.library import describe_files
from hybrid_trt.engine_library.lock import FileLock
from hybrid_trt.engine_library.native import NativeNetwork
from hybrid_trt.engine_library.settings import Settings, check_limit, read_settings, write_settings
from hybrid_trt.engine_library.states import BROKEN, READY, STALE, delete, entries, select, verify
from hybrid_trt.engine_library.work_folders import new_work_folder, remove_work_folder, sweep

UNDER_WINDOWS_RULES_TOO = True
PROFILE = Profile({"B": Range(1, 2, 2)})
SPECS = (TensorSpec("x", "float32", (1, 4)),)


def publish(folder: Path, contents: bytes = b"\x08engine", name: str = "model.onnx", **changes: object) -> Engine:
    library = Library([folder])
    source = changes.pop("source", {})
    fields = {"architecture": "sd15_unet", "weights": "a" * 64, "precision": "float16", "backend": "onnxruntime",
              "backend_version": "1.0", "device": "any"} | changes
    work = library.building_folder()
    (work / name).write_bytes(contents)
    (work / "parameters.json").write_text("{}")
    files = describe_files(work, [name, "parameters.json"])
    identity = EngineIdentity(profile=PROFILE, **fields)
    return library.publish(work, Manifest(identity, "unet", "a.safetensors", SPECS, SPECS, files, source=source))


def states(folder: Path, usable: Callable[[Manifest], Fallback | None] = lambda _: None) -> dict[str, tuple[str, str]]:
    return {entry.folder.name: (entry.state, entry.reason) for entry in entries(Library([folder]), usable)}


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


def test_disk_use_counts_everything_in_the_folder(tmp_path: Path) -> None:
    engine = publish(tmp_path, b"x" * 1000)
    (engine.folder / "runtime.cache").write_bytes(b"y" * 500)
    (entry,) = entries(Library([tmp_path]), lambda _: None)
    assert entry.bytes == sum(p.stat().st_size for p in engine.folder.iterdir())
    assert entry.bytes > 1500
    assert entry.to_json()["key"] == engine.manifest.identity.key


def test_verify_reads_everything_and_delete_leaves_nothing(tmp_path: Path) -> None:
    engine = publish(tmp_path)
    (entry,) = entries(Library([tmp_path]), lambda _: None)
    assert verify(entry) is None
    engine.main_file.write_bytes(b"\x08ENGINE")
    assert verify(entry).reason is Reason.BROKEN_ENGINE
    assert "its hash differs" in verify(entry).detail
    delete(entry)
    assert contents(tmp_path) == []


def test_deleting_from_a_read_only_library_is_told(tmp_path: Path) -> None:
    publish(tmp_path / "library")
    (entry,) = entries(Library([tmp_path / "library"]), lambda _: None)
    with read_only(tmp_path / "library"):
        with pytest.raises(LibraryError, match="cannot be written"):
            delete(entry)
        assert verify(entry) is None, "reading works"


def test_an_engine_in_use_is_deleted_or_left_whole(tmp_path: Path, system: str) -> None:
    engine = publish(tmp_path)
    (entry,) = entries(Library([tmp_path]), lambda _: None)
    with engine.main_file.open("rb"):
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
    found = entries(Library([tmp_path]), lambda _: None)
    for name in (one.folder.name, one.folder.name[:-2], one.manifest.identity.key[:10]):
        assert select(found, name).folder == one.folder
    with pytest.raises(LibraryError, match=f"could be any of .*{other.folder.name}"):
        select(found, "sd15_unet")
    with pytest.raises(LibraryError, match="no engine is called 'x'"):
        select(found, "x")


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


def test_an_engine_of_compiled_programs_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"compiled programs, which no other machine would open. Build it there"):
        export_engine(publish(tmp_path / "one", name="B2-H64-W64.bin"), tmp_path)
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


HOLDER = """
import sys, time
sys.path[:0] = [{support!r}, {tools!r}]
import pack
from pathlib import Path
from hybrid_trt.engine_library.lock import FileLock
from hybrid_trt.engine_library.work_folders import new_work_folder
assert FileLock(Path({folder!r}) / "a.lock").acquire()
(new_work_folder(Path({folder!r})) / "half").write_text("an engine")
print("held", flush=True)
time.sleep(600)
"""


def test_locks_and_leftovers_of_a_killed_process_are_free_at_once(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    code = HOLDER.format(support=str(tests / "support"), tools=str(tests.parent / "tools"), folder=str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().strip() == "held"
        lock = FileLock(tmp_path / "a.lock")
        mine = new_work_folder(tmp_path)
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
    remove_work_folder(mine)
    assert contents(tmp_path) == []


def test_leftovers_are_swept_when_the_library_is_next_built_into(tmp_path: Path) -> None:
    (tmp_path / ".building-1-x").mkdir()
    (tmp_path / ".building-1-x" / "model.onnx").write_text("half")
    library = Library([tmp_path])
    folder = library.building_folder()
    assert contents(tmp_path) == [folder.name, folder.name + ".lock"]
    library.discard(folder)
    assert contents(tmp_path) == []


def from_file(path: Path, seed: int = 1) -> NativeNetwork:
    """A network that ComfyUI's loader could have made from a file."""

    def load_diffusion_model(*_: object) -> None:
        raise AssertionError("nobody loads it again")

    network = small_network(seed)
    network.patcher.cached_patcher_init = (load_diffusion_model, (str(path), {}))
    return network


@pytest.fixture
def hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The hashes of weights that were really computed; the cache lies in the temporary folder."""
    computed: list[str] = []
    real = weights._hash

    def counted(*arguments: object) -> str:
        computed.append(real(*arguments))
        return computed[-1]

    monkeypatch.setattr(weights, "_hash", counted)
    hash_cache.use(tmp_path / "library")
    yield computed
    hash_cache.use(None)


def test_a_file_is_hashed_once_for_all_starts(tmp_path: Path, hashing: list[str]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    first = from_file(file).weights_hash()
    assert from_file(file).weights_hash() == first
    assert hashing == [first], "the second start read it from disk"
    file.write_bytes(b"22")
    other = from_file(file, seed=2).weights_hash()
    assert other != first
    assert hashing == [first, other], "the file has changed"


def test_patched_or_otherwise_loaded_models_are_hashed_themselves(tmp_path: Path, hashing: list[str]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    plain = from_file(file)
    plain.weights_hash()
    patched = plain.patcher.clone()
    name = next(name for name, p in patched.model.named_parameters() if name.endswith("to_k.weight"))
    patched.add_patches({name: ("diff", (patched.model.get_parameter(name) + 1,))})
    lora = NativeNetwork(patched, plain.module, plain.prefix, plain.dtype, "lora")
    assert lora.weights_hash() != plain.weights_hash()
    half = from_file(file)
    half.module.half()
    half.weights_hash()
    unknown = from_file(file)
    unknown.patcher.cached_patcher_init = (from_file, (str(file), {"operations": object()}))
    unknown.weights_hash()
    small_network().weights_hash()
    assert len(hashing) == 5


def test_a_read_only_library_only_costs_the_hash(tmp_path: Path, hashing: list[str]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    with read_only(tmp_path / "library"):
        assert from_file(file).weights_hash() == from_file(file).weights_hash()
    assert len(hashing) == 2


def test_no_engine_for_a_model_is_known_without_hashing_it(tmp_path: Path, hashing: list[str]) -> None:
    mine, other = small_network(1), small_network(2)
    library = Library([tmp_path])
    assert not library.may_have("sd15_unet", mine.fingerprint)
    work = library.building_folder()
    (work / "model.onnx").write_bytes(b"\x08")
    identity = EngineIdentity("sd15_unet", "a" * 64, "float32", PROFILE, "onnxruntime", "1", "any")
    files = describe_files(work, ["model.onnx"])
    library.publish(
        work, Manifest(identity, "unet", "mine", SPECS, SPECS, files, fingerprint=mine.fingerprint())
    )
    assert library.may_have("sd15_unet", mine.fingerprint)
    assert not library.may_have("sd15_unet", other.fingerprint)
    assert not library.may_have("sdxl_unet", mine.fingerprint)


def test_folders_of_the_user_come_before_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Builds go to the first folder. ComfyUI reads extra_model_paths.yaml before it loads packs."""
    pack.import_comfy()
    import folder_paths

    own, users = str(Path(folder_paths.models_dir) / "trt_engines"), str(tmp_path / "elsewhere")
    nodes = types.ModuleType("hybrid_trt.nodes")
    nodes.__path__ = [str(pack.ROOT / "nodes")]
    monkeypatch.setitem(sys.modules, "hybrid_trt.nodes", nodes)
    for configured, found in (([users], [users, own]), ([], [own])):
        monkeypatch.delitem(sys.modules, "hybrid_trt.nodes.library_folder", raising=False)
        monkeypatch.setitem(folder_paths.folder_names_and_paths, "trt_engines", (list(configured), set()))
        module = importlib.import_module("hybrid_trt.nodes.library_folder")
        assert folder_paths.get_folder_paths(module.FOLDER_KEY) == found
    monkeypatch.delitem(sys.modules, "hybrid_trt.nodes.library_folder")


def test_the_limit_counts_what_is_there(tmp_path: Path) -> None:
    library = Library([tmp_path])
    check_limit(library, 10**15, "It")  # no settings, no limit
    write_settings(tmp_path, Settings(1e-6))
    check_limit(library, 1000, "It")
    publish(tmp_path, b"x" * 600)
    used = library.engines()[0].manifest.bytes
    check_limit(library, 1000 - used, "It")
    with pytest.raises(LibraryError, match=r"It needs about .* settings allow .* native keeps serving"):
        check_limit(library, 1001 - used, "It")
    (tmp_path / ".settings.json").write_text("{")
    assert read_settings(tmp_path) == Settings()


def test_settings_that_cannot_be_written_are_refused_with_a_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(LibraryError, match="could not be used"):
        write_settings(blocked, Settings(1.0))
