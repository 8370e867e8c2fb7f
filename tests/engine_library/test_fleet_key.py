"""The fleet key: a worker accepts what another one with the same key built and proved, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_engine import publish_engine
from fleet_worker import work
from hybrid_trt.backends import backends
from hybrid_trt.backends.torch_inductor.compiled import cpu_kind
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.engine_builder.command_line import main as cli
from hybrid_trt.engine_library import Engine, Library, Reason, fleet_key, trust
from hybrid_trt.engine_library.manifest import MANIFEST_NAME, RECORD_NAME

WORKER = Path(__file__).parents[1] / "support" / "fleet_worker.py"
HERE, DRIVER = "sm_90 NVIDIA H100", "580.1"
POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows keeps no such rights")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    fleet_key.make(tmp_path / "fleet.key")
    return tmp_path / "fleet.key"


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Turns this process into a worker with a secret of its own, and a fleet key or none."""

    def become(worker: str, fleet: Path | None = None) -> None:
        monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / worker))
        if fleet is None:
            monkeypatch.delenv(fleet_key.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(fleet_key.VARIABLE, str(fleet))

    fleet_key._warn.cache_clear()
    return become


@pytest.fixture
def engine(tmp_path: Path, key: Path, on: Callable[..., None]) -> Engine:
    """An engine that the worker ``first`` built."""
    on("first", key)
    return publish_engine(tmp_path / "library")


def reason(engine: Engine, gpu: str = "") -> Reason | None:
    found = trust.why_unusable(engine, gpu)
    return None if found is None else found.reason


@pytest.mark.fault("the engine that a worker finds is of a fleet with another key",
                   see="normal speed: *outdated engine*; a build replaces it")
def test_workers_with_one_key_accept_each_others_engines_and_those_without_do_not(
    engine: Engine, key: Path, on: Callable[..., None], tmp_path: Path
) -> None:
    on("second", key)
    assert reason(engine) is None
    assert trust.built_here(engine)
    assert not trust.record_of(engine).here
    fleet_key.make(tmp_path / "other.key")
    on("second", tmp_path / "other.key")
    assert reason(engine) is Reason.STALE_ENGINE
    on("second")
    assert reason(engine) is Reason.STALE_ENGINE
    on("first")
    assert reason(engine) is None, "who built it needs no fleet key"
    assert trust.record_of(engine).here


def test_a_key_changes_nothing_for_engines_from_before_it_and_none_leaves_no_trace(
    tmp_path: Path, key: Path, on: Callable[..., None]
) -> None:
    on("first")
    engine = publish_engine(tmp_path / "library")
    assert fleet_key.VARIABLE not in os.environ
    assert "fleet" not in json.loads((engine.folder / RECORD_NAME).read_text())
    on("first", key)
    assert reason(engine) is None
    on("second", key)
    assert reason(engine) is Reason.STALE_ENGINE, "it was not signed with the key"


def folder_at(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_at(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe_at(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


FLAWS: dict[str, Callable[[Path], object]] = {
    "others may read it": lambda path: path.chmod(0o640),
    "everybody may read it": lambda path: path.chmod(0o604),
    "it is a folder": folder_at,
    "it is a link": link_at,
    "it is a pipe": pipe_at,
    "it is gone": Path.unlink,
    "it is empty": lambda path: path.write_bytes(b""),
    "it is short": lambda path: path.write_bytes(secrets.token_bytes(31)),
    "it is huge": lambda path: path.write_bytes(secrets.token_bytes(fleet_key.LONGEST + 1)),
    "it is all zeros": lambda path: path.write_bytes(bytes(64)),
}


@POSIX
@pytest.mark.fault("the fleet key may be read by others, is no regular file, or is no key",
                   see="a warning; engines of other workers are *stale*")
@pytest.mark.parametrize("flaw", FLAWS.values(), ids=FLAWS)
def test_a_file_that_is_no_good_key_is_refused_with_a_sentence_and_nothing_foreign_is_accepted(
    flaw: Callable[[Path], object], engine: Engine, key: Path, on: Callable[..., None], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flaw(key)
    on("second", key)
    with caplog.at_level(logging.WARNING):
        found = trust.why_unusable(engine)
    assert found.reason is Reason.STALE_ENGINE
    assert "no fleet key is used" in found.sentence()
    (warning,) = [line for line in caplog.messages if "there is no fleet key" in line]
    assert fleet_key.VARIABLE in warning
    assert str(key) not in warning + found.sentence()
    assert not fleet_key.in_use()
    assert "fleet" not in json.loads((publish_engine(tmp_path / "own").folder / RECORD_NAME).read_text())
    on("first", key)
    assert reason(engine) is None, "its own secret is as good as before"


@POSIX
def test_a_key_counts_from_the_moment_that_only_its_owner_may_read_it(
    engine: Engine, key: Path, on: Callable[..., None]
) -> None:
    on("second", key)
    key.chmod(0o644)
    assert reason(engine) is Reason.STALE_ENGINE
    key.chmod(0o400)
    assert reason(engine) is None


@pytest.mark.fault("somebody without the fleet key changes an engine of the fleet, its manifest or its record",
                   see="normal speed: *outdated engine*")
def test_what_the_key_signed_cannot_be_changed_without_it(
    engine: Engine, key: Path, on: Callable[..., None], tmp_path: Path
) -> None:
    record, manifest = engine.folder / RECORD_NAME, engine.folder / MANIFEST_NAME
    whole = {path: path.read_text() for path in (record, manifest)}
    fields = json.loads(whole[record])
    another = publish_engine(tmp_path / "other library", b"\x08other")
    on("second", key)
    for changed in (
        {"gpu": HERE}, {"parity": {"rel_err": 0.0}}, {"fleet": "0" * 64}, {"fleet": "\u00e9" * 64}, {"fleet": None},
        {"fleet": fields["signature"]}, {"fleet": json.loads((another.folder / RECORD_NAME).read_text())["fleet"]},
    ):  # fmt: skip
        record.write_text(json.dumps(fields | changed))
        assert reason(engine) is Reason.STALE_ENGINE, changed
    record.write_text(whole[record])
    assert reason(engine) is None
    manifest.write_text(json.dumps(json.loads(whole[manifest]) | {"label": "another"}))
    (edited,) = Library([tmp_path / "library"]).engines()
    assert reason(edited) is Reason.STALE_ENGINE


@pytest.mark.parametrize(("proved_on", "driver", "expected"), [
    (DRIVER, DRIVER, None), (DRIVER, "570.9", Reason.UNCHECKED), (DRIVER, "", Reason.UNCHECKED),
    ("", "", Reason.UNCHECKED),  # a driver that nobody knows is like no other
])  # fmt: skip
def test_an_engine_of_another_worker_serves_on_the_kind_of_card_and_the_driver_that_it_was_proved_on(
    engine: Engine, key: Path, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch, proved_on: str, driver: str,
    expected: Reason | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(trust, "driver_version", lambda: driver)
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, parity={"driver": proved_on}, gpu=HERE))
    assert reason(engine, HERE) is None, "who proved it goes on with a new driver"
    on("second", key)
    assert reason(engine, HERE) is expected
    assert reason(engine, "sm_80 NVIDIA A100") is Reason.UNCHECKED


def test_a_verdict_on_another_workers_engine_is_kept_for_this_one_alone(
    engine: Engine, key: Path, on: Callable[..., None]
) -> None:
    before = (engine.folder / RECORD_NAME).read_bytes()
    on("second", key)
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.REFUSED, "it differs on this card"))
    assert reason(engine) is Reason.BROKEN_ENGINE
    assert (engine.folder / RECORD_NAME).read_bytes() == before
    for worker in ("first", "third"):
        on(worker, key)
        assert reason(engine) is None


@pytest.mark.fault("the fleet key is changed after a leak",
                   see="normal speed: *outdated engine*, for engines of other workers")
def test_what_was_taken_over_by_a_fleet_key_counts_no_more_without_it(
    engine: Engine, key: Path, on: Callable[..., None], tmp_path: Path
) -> None:
    on("second", key)
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, gpu=HERE))
    assert reason(engine, HERE) is None
    assert trust.record_of(engine).here
    fleet_key.make(tmp_path / "new.key")
    for now in (tmp_path / "new.key", None):
        on("second", now)
        assert reason(engine) is Reason.STALE_ENGINE
        on("first", now)
        assert reason(engine) is None, "it built the engine itself"


@POSIX
def test_a_worker_that_can_keep_no_secret_builds_for_its_fleet_all_the_same(
    tmp_path: Path, key: Path, on: Callable[..., None]
) -> None:
    (tmp_path / "no folder").write_text("")
    on("no folder", key)
    engine = publish_engine(tmp_path / "library")
    on("second", key)
    assert reason(engine) is None


def test_the_models_file_of_another_worker_tells_nothing_about_this_ones(
    tmp_path: Path, key: Path, on: Callable[..., None]
) -> None:
    """Copies of one file have other times, and an engine with a LoRA has no file's hash."""
    model = tmp_path / "model.safetensors"
    model.write_text("weights")
    on("first", key)
    engine = publish_engine(tmp_path / "library", source={"path": str(model), "size": 7, "mtime_ns": 1})
    assert source_changed(engine).reason is Reason.STALE_ENGINE
    on("second", key)
    assert source_changed(engine) is None


def test_an_engine_of_another_gpu_or_torch_is_refused(tmp_path: Path) -> None:
    backend, cpu = backends()["torch"], torch.device("cpu")
    for changes, refused in (({"device": "NVIDIA H200, 9.0"}, Reason.WRONG_GPU),
                             ({"backend_version": "2.0"}, Reason.STALE_ENGINE)):  # fmt: skip
        made_for = {"backend": "torch", "backend_version": backend.version(), "device": "cpu"} | changes
        assert backend.cannot_use(publish_engine(tmp_path, **made_for).manifest, cpu).reason is refused


@pytest.mark.fault("a compiled file for the CPU comes from a CPU with other instructions",
                   see="normal speed: *outdated engine*")
def test_a_file_that_was_compiled_for_another_cpu_is_not_opened(tmp_path: Path) -> None:
    backend, cpu = backends()["torch"], torch.device("cpu")
    manifest = publish_engine(tmp_path, backend="torch", backend_version=backend.version(), device="cpu").manifest
    assert backend.cannot_use(manifest, cpu) is None, "earlier ones do not tell"
    assert backend.cannot_use(replace(manifest, parity={"cpu": cpu_kind()}), cpu) is None
    refused = backend.cannot_use(replace(manifest, parity={"cpu": "another"}), cpu)
    assert "a CPU with other instructions" in refused.detail


def test_the_command_makes_a_key_that_others_cannot_read_and_overwrites_none(
    tmp_path: Path, on: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.key"
    assert cli.main(["fleet-key", str(path)]) == 0
    contents = path.read_bytes()
    on("first", path)
    assert fleet_key.in_use()
    assert cli.main(["fleet-key", str(path)]) == 1
    assert path.read_bytes() == contents
    assert contents.hex() not in "".join(capsys.readouterr())


def test_a_second_process_with_the_key_serves_within_seconds_and_builds_nothing(
    tmp_path: Path, key: Path, on: Callable[..., None]
) -> None:
    on("first", key)
    first = work(tmp_path / "shared", "onnxruntime", builds=True)
    (tmp_path / "home").mkdir()
    own = {"HOME": str(tmp_path / "home"), trust.FOLDER_VARIABLE: str(tmp_path / "second")}
    ended = subprocess.run([sys.executable, "-P", str(WORKER), str(tmp_path / "shared"), "onnxruntime", "builds"],
                           capture_output=True, text=True, check=False, env=os.environ | own)  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    second = json.loads(ended.stdout.splitlines()[-1])
    assert (first["steps"], first["serving"]) == (["export"], True)
    assert (second["steps"], second["serving"]) == ([], True)
    assert max(first["error"], second["error"]) <= 1e-5
    assert second["seconds"] <= 30
