"""Links, pipes and huge files where the library's files belong neither hang the server, nor are followed, nor run."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builds import PROFILE, small_network
from compiling import COMPILES
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor import compiled
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Unavailable, trust
from hybrid_trt.engine_library.atomic_files import FileLock
from hybrid_trt.engine_library.disk import FILE_NAME, Settings, read_settings
from hybrid_trt.engine_library.inventory import last_used, mark_used
from hybrid_trt.engine_library.manifest import MANIFEST_NAME, RECORD_NAME, USE_NAME, Manifest, ManifestError
from hybrid_trt.engine_library.safe_files import read_bytes
from hybrid_trt.page_api import node_records

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


@KINDS
def test_a_mark_of_use_touches_nothing_else(kind: str, engine: Engine, target: Path) -> None:
    os.utime(target, (1, 1))
    put(engine.folder / USE_NAME, kind, target)
    in_time(lambda: mark_used([engine]))
    assert target.stat().st_mtime == 1
    (engine.folder / USE_NAME).unlink()
    assert last_used(engine) is None


@KINDS
def test_settings_are_read_from_a_file_alone(kind: str, tmp_path: Path, target: Path) -> None:
    target.write_text('{"limit_gb": 7}')
    put(tmp_path / FILE_NAME, kind, target)
    assert in_time(lambda: read_settings(tmp_path)) == Settings()


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


def test_a_file_without_end_is_not_read_whole(tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # takes no disk
    with pytest.raises(OSError, match="has more than 1000 bytes"):
        read_bytes(huge, 1000)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 50_000, "[1, 2]", "null", '"x"', '{"a": {"label": 1}}'])
def test_notes_on_nodes_of_any_form_let_the_pack_load(text: str, tmp_path: Path) -> None:
    (tmp_path / node_records.FILE_NAME).write_text(text)
    assert not node_records.read_records(tmp_path / node_records.FILE_NAME)


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
    assert "may be read by others" in caplog.text
    again = trust.sign("text")
    assert again != signature, "a new secret"
    assert trust.is_signed("text", again)


def test_a_secret_is_no_link_to_a_file_that_others_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "own"))
    trust.sign("text")
    key = trust.key_folder() / "local.key"
    known = tmp_path / "known"
    known.write_bytes(b"k" * trust.KEY_LENGTH)
    known.chmod(0o600)
    put(key, "link", known)
    assert not trust.is_signed("text", trust._digest(b"k" * trust.KEY_LENGTH, "text"))


def test_what_is_run_is_made_of_the_very_bytes_that_were_checked(engine: Engine) -> None:
    """Neither its size nor its time tells that a file was changed through a mapping."""
    name = next(iter(engine.manifest.files))
    path = engine.folder / name
    before, contents = path.stat(), engine.read_checked(name)
    assert contents == path.read_bytes()
    trust.check_contents(engine)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-1] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        with pytest.raises(Unavailable, match="its hash differs"):
            engine.read_checked(name)
    finally:
        path.write_bytes(contents)


@pytest.mark.slow
@COMPILES
def test_a_compiled_file_that_was_changed_through_a_mapping_does_not_run(tmp_path: Path) -> None:
    """Neither its size nor its time tells of that, and it is a pickle."""
    backend = backends()["torch"]
    library = Library([tmp_path])
    engine = build_engine(BuildOrder(small_network(), "float32", PROFILE, backend), library, lambda *_: None)
    sizes = backend.sizes(engine)[0]
    assert backend.open_live(engine, sizes)
    trust.check_contents(engine)
    name = compiled.file_name(sizes)
    path = engine.folder / name
    before = path.stat()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as contents:
        contents[-1] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Unavailable, match="its hash differs"):
        backend.open_live(engine, sizes)
