"""Links, pipes and huge files where the library's files belong neither hang the server, nor are followed, nor run."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import PROFILE, small_network
from hybrid_trt.architectures.shapes import sample_inputs
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.cache_folder import keep_others_out
from hybrid_trt.comfy_model import hash_cache
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.command_line import workflows
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Unavailable, fleet_key, safe_files, trust
from hybrid_trt.engine_library.disk import FILE_NAME, Settings, read_settings
from hybrid_trt.engine_library.inventory import last_used, mark_used
from hybrid_trt.engine_library.locks import FileLock
from hybrid_trt.engine_library.manifest import MANIFEST_NAME, RECORD_NAME, USE_NAME, Manifest, ManifestError
from hybrid_trt.engine_library.safe_files import is_own_folder, read_bytes
from hybrid_trt.page_api import node_records
from hybrid_trt.saved_workflows.graph import WorkflowError
from hybrid_trt.sessions.file_session import FileSession
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links and pipes are those of POSIX")

THEIRS = b"not ours" * 200


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library([tmp_path_factory.mktemp("library")])
    order = BuildOrder(small_network(), "float32", PROFILE, backends()["onnxruntime"])
    build_engine(order, library, lambda *_: None, run=run_here)
    return library


@pytest.fixture
def engine(library: Library) -> Engine:
    (found,) = library.engines()
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere"
    path.write_bytes(THEIRS)
    return path


def in_time(work: Callable[[], Any], seconds: float = 10) -> Any:
    """The result of something that would wait for ever if it opened a pipe."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits"
    return found[0] if found else None


def put(path: Path, kind: str, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target) if kind == "link" else os.mkfifo(path)


KINDS = pytest.mark.parametrize("kind", ["link", "pipe"])


@pytest.mark.fault("a link or a pipe lies in the place of a lock", see="the target is untouched; nothing hangs")
@KINDS
def test_a_lock_writes_to_nothing_but_a_file_of_its_own(kind: str, tmp_path: Path, target: Path) -> None:
    put(tmp_path / "a.lock", kind, target)

    def taken() -> bool:
        try:
            return FileLock(tmp_path / "a.lock").acquire()
        except OSError:
            return False

    assert in_time(taken) is False
    assert in_time(FileLock(tmp_path / "a.lock").holder) == "another process"
    assert target.read_bytes() == THEIRS


@pytest.mark.fault("a link or a pipe lies in the place of the mark of the last use",
                   see="nothing: the target is untouched")
@KINDS
def test_a_mark_of_use_touches_nothing_else(kind: str, engine: Engine, target: Path) -> None:
    os.utime(target, (1, 1))
    put(engine.folder / USE_NAME, kind, target)
    in_time(lambda: mark_used([engine]))
    assert target.stat().st_mtime == 1
    (engine.folder / USE_NAME).unlink()
    assert last_used(engine) is None


@pytest.mark.fault("a link or a pipe lies in the place of the settings", see="the usual settings; nothing hangs")
@KINDS
def test_settings_are_read_from_a_file_alone(kind: str, tmp_path: Path, target: Path) -> None:
    target.write_text('{"limit_gb": 7}')
    put(tmp_path / FILE_NAME, kind, target)
    assert in_time(lambda: read_settings(tmp_path)) == Settings()


@pytest.mark.fault("a link or a pipe lies in the place of a manifest or a record",
                   see="that engine does not serve; nothing hangs")
@KINDS
@pytest.mark.parametrize("name", [MANIFEST_NAME, RECORD_NAME])
def test_manifests_and_records_are_files(kind: str, name: str, engine: Engine, tmp_path: Path) -> None:
    kept = engine.folder / name
    aside = tmp_path / name
    kept.rename(aside)
    try:
        put(kept, kind, aside)
        if name == MANIFEST_NAME:
            refused = in_time(lambda: pytest.raises(ManifestError, Manifest.read, kept))
            assert "is no regular file" in str(refused.value)
        else:
            assert in_time(lambda: trust.record_of(engine)) is None
    finally:
        kept.unlink()
        aside.rename(kept)
    assert trust.built_here(engine)


@pytest.mark.fault("a small file has grown to a terabyte", see="it is refused unread")
def test_a_file_without_end_is_not_read_whole(tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # takes no disk
    with pytest.raises(OSError, match="has more than 1000 bytes"):
        read_bytes(huge, 1000)


TEXTS = ["[" * 100_000, '{"a": ' * 50_000, "[1, 2]", "null", '"x"', "NaN", '{"a": {"label": 1}}', '{"limit_gb": [1]}',
         json.dumps({json.dumps([{"path": "x"}]): ["no hash"]})]  # fmt: skip
"""Files of JSON that hold something else than they should."""


@pytest.mark.fault("settings, hashes or a workflow nest 100,000 deep or hold something else",
                   see="the usual settings, or an error in one sentence")
@pytest.mark.parametrize("text", TEXTS)
def test_settings_hashes_and_workflows_of_any_form_are_refused_and_end_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (FILE_NAME, hash_cache.FILE_NAME):
        (tmp_path / name).write_text(text)
    assert read_settings(tmp_path) == Settings()
    monkeypatch.setattr(hash_cache, "_folder", tmp_path)
    assert hash_cache.known_hashes({"path": "x"}) == set()
    with pytest.raises(WorkflowError):
        workflows._read(tmp_path / FILE_NAME)


@pytest.mark.fault("the file of notes on nodes is nonsense", see="nothing: the pack loads")
@pytest.mark.parametrize("text", TEXTS)
def test_notes_on_nodes_of_any_form_let_the_pack_load(text: str, tmp_path: Path) -> None:
    (tmp_path / node_records.FILE_NAME).write_text(text)
    assert not node_records.read_records(tmp_path / node_records.FILE_NAME)


@pytest.mark.fault("others may read this machine's key", see="normal speed: *outdated engine*, and a warning")
@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_a_secret_that_others_may_read_proves_nothing(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path))
    signature = trust.sign("text")
    key = trust.key_folder() / "local.key"
    assert key.stat().st_mode & 0o077 == 0
    assert trust.is_signed("text", signature)
    key.chmod(mode)
    for _ in range(2):
        assert not trust.is_signed("text", signature)
    assert "may be read by other users" in caplog.text
    again = trust.sign("text")
    assert again != signature, "a new secret"
    assert trust.is_signed("text", again)


@pytest.mark.fault("a key belongs to another user, and ComfyUI runs as root", see="it is not used, with a warning")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_another_users_key_is_not_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(fleet_key.VARIABLE, str(tmp_path / "fleet.key"))
    fleet_key.make(tmp_path / "fleet.key")
    signature = trust.sign("text")
    for path in (trust.key_folder() / "local.key", tmp_path / "fleet.key"):
        os.chown(path, 1234, 1234)
    assert not trust.is_signed("text", signature)
    assert not fleet_key.in_use()
    assert "another user's" in fleet_key.why_refused()


@pytest.mark.fault("this machine's key is a link to a file that others know", see="normal speed: *outdated engine*")
def test_a_secret_is_no_link_to_a_file_that_others_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "own"))
    trust.sign("text")
    key = trust.key_folder() / "local.key"
    known = tmp_path / "known"
    known.write_bytes(b"k" * trust.KEY_LENGTH)
    known.chmod(0o600)
    put(key, "link", known)
    assert not trust.is_signed("text", fleet_key.digest(b"k" * trust.KEY_LENGTH, "text"))


def test_on_a_disk_without_rights_torch_keeps_its_usual_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There no folder would be better."""
    tmp_path.chmod(0o777)
    monkeypatch.setattr(safe_files, "_keeps_rights", lambda _folder: False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    keep_others_out()
    assert cache_dir() == str(tmp_path)


def put_folder(path: Path, kind: str, elsewhere: Path) -> None:
    if kind == "link":
        elsewhere.mkdir()
        path.symlink_to(elsewhere)
    elif kind == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod({"own": 0o755, "foreign": 0o755, "open": 0o777, "shared": 0o775}[kind])
    if kind == "foreign":
        os.chown(path, 12345, -1)


@pytest.mark.fault("others may write to the folder of torch's compiled programs",
                   see="a warning; a private folder is used")
@pytest.mark.parametrize("variable", ["", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
@pytest.mark.parametrize("kind", ["own", "foreign", "open", "shared", "link", "file"])
def test_what_torch_compiles_is_kept_where_nobody_else_can_write(
    kind: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs what it finds there under a name that everybody can work out."""
    if kind == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    usual = Path(default_cache_dir()) if variable == "" else tmp_path / "named"
    put_folder(usual, kind, tmp_path / "elsewhere")
    if variable:
        monkeypatch.setenv(variable, str(usual))
    with torch._inductor.config.patch(cpp_cache_precompile_headers=True):
        for _ in range(2):
            keep_others_out()
        headers = torch._inductor.config.cpp_cache_precompile_headers
    assert headers == (kind == "own" or variable == "TRITON_CACHE_DIR")
    inductor, triton = Path(cache_dir()), Path(triton_cache_dir(0))
    assert ((triton if variable == "TRITON_CACHE_DIR" else inductor) == usual) == (kind == "own")
    for folder in (inductor, triton):
        assert is_own_folder(folder)
        assert (folder.stat().st_mode & 0o022, folder.stat().st_uid) == (0, os.geteuid())
    warned = "others may write" in caplog.text
    assert warned == (kind != "own")
    assert not list((tmp_path / "elsewhere").glob("*"))


@pytest.mark.fault("a file is changed through a mapping, with its old size and time, before or after its check",
                   see="normal speed: *damaged engine*; what was checked is what is run")
def test_what_is_run_is_made_of_the_very_bytes_that_were_checked(engine: Engine) -> None:
    """Neither its size nor its time tells that a file was changed through a mapping."""
    name = next(iter(engine.manifest.files))
    path = engine.folder / name
    before, contents = path.stat(), engine.read_checked(name)
    assert contents == path.read_bytes()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-1] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        with pytest.raises(Unavailable, match="its content changed"):
            engine.read_checked(name)
    finally:
        path.write_bytes(contents)


@pytest.fixture
def given() -> dict[str, torch.Tensor]:
    net = small_network()
    return sample_inputs(net.architecture().inputs(net.module, "float32"), PROFILE.sizes("opt"), seed=3)


@pytest.fixture
def kept(engine: Engine, tmp_path: Path) -> Iterator[None]:
    """The engine's files are put back afterwards."""
    for name in engine.manifest.files:
        shutil.copy2(engine.folder / name, tmp_path / name)
    yield
    for name in engine.manifest.files:
        shutil.copy2(tmp_path / name, engine.folder / name)


@pytest.mark.fault("an open engine's file is overwritten in its place, cut short or deleted",
                   see="nothing: what was opened serves on")
@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_an_open_engine_computes_the_same_whatever_becomes_of_its_files(
    name: str, engine: Engine, given: dict[str, torch.Tensor], kept: None
) -> None:
    session, path = FileSession(engine, backends()["onnxruntime"].load, torch.device("cpu")), engine.folder / name
    before = session.run(given)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:] = bytes(len(mapped))
    for change in (lambda: None, lambda: os.truncate(path, 0), path.unlink):
        change()
        again = session.run(given)
        assert all(torch.equal(again[output], value) for output, value in before.items())
