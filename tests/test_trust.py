"""Only what this machine built, or compared with native, serves: an engine's key is a hash that anybody can compute."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from builds import children, read_only, small_network
from fake_engine import publish_engine
from hybrid_trt.architectures.image_latent import ANY
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.backends.onnxruntime import OnnxRuntimeBackend
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder import check
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker_process import run_in_worker
from hybrid_trt.engine_library import (
    BuildError,
    Engine,
    EngineQuery,
    Library,
    Manifest,
    Reason,
    Unavailable,
    local_key,
    trust,
)
from hybrid_trt.engine_library.engine import describe_files
from hybrid_trt.engine_library.inventory import BROKEN, READY, STALE, UNCHECKED, entries
from hybrid_trt.engine_library.manifest import RECORD_NAME

HERE = "sm_89 NVIDIA RTX of a test"
PROFILE = Profile({"B": Range(1, 2, 2), "H": Range(4, 8, 12), "W": Range(4, 8, 12), "T": Range(77, 77, 77)})


@pytest.fixture(autouse=True)
def key_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own for each test."""
    monkeypatch.setenv(local_key.FOLDER_VARIABLE, str(tmp_path / "keys"))
    return tmp_path / "keys" / "hybrid-trt"


def state(root: Path, gpu: str = "") -> tuple[str, str]:
    (entry,) = entries(Library([root]), lambda _: None, source_changed, gpu)
    return entry.state, entry.reason


def test_a_signature_holds_on_this_machine_only(key_folder: Path) -> None:
    assert not local_key.is_signed("text", "0" * 64), "no signature, no secret"
    signature = local_key.sign("text")
    assert local_key.is_signed("text", signature)
    assert not local_key.is_signed("other", signature)
    assert not local_key.is_signed("text", None)
    key = key_folder / "local.key"
    assert key.stat().st_mode & 0o077 == 0
    key.unlink()
    assert not local_key.is_signed("text", signature), "another machine"
    assert local_key.sign("text") != signature


@pytest.mark.parametrize("contents", [b"", b"\0" * 31, b"\0" * 33], ids=["empty", "short", "long"])
def test_a_secret_that_is_none_is_not_used_and_replaced(key_folder: Path, contents: bytes) -> None:
    """Everybody can sign with an empty one."""
    key_folder.mkdir(parents=True)
    (key_folder / "local.key").write_bytes(contents)
    assert local_key.stamp() is None
    assert not local_key.is_signed("text", local_key._digest(contents, "text"))
    signature = local_key.sign("text")
    assert local_key.is_signed("text", signature)
    key = key_folder / "local.key"
    assert (len(key.read_bytes()), key.stat().st_mode & 0o077) == (32, 0)
    assert [p.name for p in key_folder.iterdir()] == ["local.key"]


def test_what_was_built_here_serves_and_what_came_from_elsewhere_does_not(tmp_path: Path) -> None:
    publish_engine(tmp_path / "mine")
    assert state(tmp_path / "mine") == (READY, "")
    engine = publish_engine(tmp_path / "foreign", made_here=False)
    found, reason = state(tmp_path / "foreign")
    assert (found, "was not built on this machine" in reason) == (STALE, True)
    made = engine.manifest.identity
    wanted = EngineQuery(made.architecture, [made.weights], made.precision, made.profile, ["onnxruntime"])
    with pytest.raises(Unavailable) as refused:
        Library([tmp_path / "foreign"]).find(wanted, lambda _: None)
    assert refused.value.fallback.reason is Reason.STALE_ENGINE
    assert "build it again" in refused.value.fallback.sentence()


def test_an_engine_of_a_machine_that_lost_its_secret_is_stale_and_says_what_to_do(
    tmp_path: Path, key_folder: Path
) -> None:
    publish_engine(tmp_path / "file")
    publish_engine(tmp_path / "torch", name="B2.bin")
    assert state(tmp_path / "file")[0] == state(tmp_path / "torch")[0] == READY
    shutil.rmtree(key_folder)
    for folder in ("file", "torch"):
        found, reason = state(tmp_path / folder)
        assert (found, local_key.FOLDER_VARIABLE in reason) == (STALE, True)


def test_a_record_is_of_one_manifest(tmp_path: Path) -> None:
    mine = publish_engine(tmp_path / "mine")
    foreign = publish_engine(tmp_path / "foreign", b"\x08another", made_here=False)
    assert mine.folder.name == foreign.folder.name
    shutil.copy(mine.folder / RECORD_NAME, foreign.folder)
    assert state(tmp_path / "foreign")[0] == STALE
    path = mine.folder / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"outputs": data["inputs"] * 0}))
    assert state(tmp_path / "mine")[0] == STALE


def test_records_find_a_place_when_the_library_is_read_only_and_last_as_long_as_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = publish_engine(tmp_path / "library", made_here=False)
    with read_only(tmp_path / "library"):
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.CHECKED))
        assert trust.flaw(engine) is None
    assert not (engine.folder / RECORD_NAME).exists()
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(local_key.FOLDER_VARIABLE, str(tmp_path / "a file"))
    assert trust.flaw(engine).reason is Reason.STALE_ENGINE, "another machine"
    with caplog.at_level(logging.WARNING):
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.CHECKED))
    assert local_key.FOLDER_VARIABLE in caplog.text
    assert trust.flaw(engine) is None, "until this process ends"


def test_a_path_from_elsewhere_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows a look at \\\\server\\share sends the user's credentials there."""
    source = {"path": "\\\\evil\\share\\a.safetensors", "size": 1, "mtime_ns": 1}
    foreign = publish_engine(tmp_path / "copied", source=source, made_here=False)
    for checked in (False, True):
        if checked:
            trust.keep(foreign.folder, foreign.manifest, trust.Record(trust.CHECKED))
        monkeypatch.setattr("os.stat", _no_network(__import__("os").stat))
        state(tmp_path / "copied")
        monkeypatch.undo()
        monkeypatch.setenv(local_key.FOLDER_VARIABLE, str(tmp_path / "keys"))


def _no_network(real: Callable) -> Callable:
    def stat(path: object, *arguments: object, **options: object) -> object:
        assert "evil" not in str(path)
        return real(path, *arguments, **options)

    return stat


@pytest.fixture(scope="module")
def network() -> NativeNetwork:
    return small_network()


class OnGpu(OnnxRuntimeBackend):
    """ONNX Runtime, said to run on the GPU."""

    def unavailable(self, device: torch.device) -> None:
        return None


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    """A double: this machine has a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (builder, check):
            patch.setattr(module, "gpu_of", lambda device: HERE if device.type == "cuda" else "")
        yield


@pytest.fixture(scope="module")
def built(network: NativeNetwork, gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine for the GPU, built somewhere."""
    return build(network, tmp_path_factory.mktemp("somewhere"), [])


def negate(folder: Path) -> None:
    """As a negated last convolution would: everything else in the graph stays as it is."""
    change_graph(folder, "Neg")


def to_nan(folder: Path) -> None:
    change_graph(folder, "Log")  # of negative values


def change_graph(folder: Path, operation: str) -> None:
    import onnx

    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    output = model.graph.output[0].name
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == output:
                node.output[i] = "before_the_lie"
    model.graph.node.append(onnx.helper.make_node(operation, ["before_the_lie"], [output]))
    onnx.save_model(model, str(folder / "model.onnx"))




def not_run_here(engine: Engine, root: Path, change: Callable[[Path], None]) -> Engine:
    """An engine that this machine signed and never ran on its GPU, with whatever files it has now."""
    library = Library([root])
    folder = library.building_folder()
    for name in engine.manifest.files:
        shutil.copy(engine.folder / name, folder)
    change(folder)
    manifest = engine.manifest.to_json()
    manifest["files"] = {n: f.__dict__ for n, f in describe_files(folder, list(engine.manifest.files)).items()}
    return library.publish(folder, Manifest.from_json(manifest))


def build(network: NativeNetwork, root: Path, steps: list[str]) -> Engine:
    def run(task: dict, *rest: object) -> dict:
        steps.append(task["step"])
        return run_here(on_cpu(task), *rest)

    return build_engine(for_gpu(network), Library([root]), lambda *_: None, run=run)


def for_gpu(network: NativeNetwork) -> BuildOrder:
    return BuildOrder(network, "float32", PROFILE, OnGpu(), torch.device("cuda", 0))


def on_cpu(task: dict) -> dict:
    return {**task, "device": "cpu", "timed": None} if task["step"] == "check" else task


def test_an_engine_that_computes_something_else_is_refused_with_figures_and_built_anew(
    network: NativeNetwork, built: Engine, tmp_path: Path
) -> None:
    engine, figure = not_run_here(built, tmp_path / "library", negate), "differs from native by 2.00e+00"
    assert engine.manifest.identity == built.manifest.identity, "its key is the true one"
    steps: list[str] = []
    with pytest.raises(BuildError) as refused:
        build(network, tmp_path / "library", steps)
    assert figure in str(refused.value)
    assert "build again" in str(refused.value)
    found, reason = state(tmp_path / "library", HERE)
    assert (found, figure in reason) == (BROKEN, True)
    replaced = build(network, tmp_path / "library", steps)
    assert steps == ["check", "export", "build", "check"]
    assert replaced.folder == engine.folder
    assert state(tmp_path / "library", HERE) == (READY, "")


def test_what_is_no_number_never_passes(network: NativeNetwork, built: Engine, tmp_path: Path) -> None:
    not_run_here(built, tmp_path / "library", to_nan)
    with pytest.raises(BuildError, match="differs from native by inf"):
        build(network, tmp_path / "library", [])


def test_an_honest_engine_is_checked_once_and_serves_from_then_on(
    network: NativeNetwork, built: Engine, tmp_path: Path
) -> None:
    root = tmp_path / "library"
    engine = not_run_here(built, root, lambda _: None)
    steps: list[str] = []
    assert build(network, root, steps) == engine
    assert build(network, root, steps) == engine
    assert steps == ["check"]
    assert state(root, HERE) == (READY, "")
    record = trust.record_of(engine)
    assert record.verdict == trust.CHECKED
    assert 0 < record.parity["rel_err"] <= 1e-4
    assert {case["symbols"]["t"] for case in record.parity["cases"]} == {50, 900}
    assert {case["symbols"]["H"] for case in record.parity["cases"]} == {4, 8, 12}
    assert sorted(p.name for p in root.iterdir() if p.suffix != ".json") == [engine.folder.name]


def test_an_engine_that_cannot_be_opened_is_refused(network: NativeNetwork, built: Engine, tmp_path: Path) -> None:
    not_run_here(built, tmp_path / "library", lambda folder: (folder / "model.onnx").write_bytes(b"\x08engine"))
    with pytest.raises(BuildError, match="could not be run"):
        build(network, tmp_path / "library", [])
    assert state(tmp_path / "library", HERE)[0] == BROKEN


def test_a_check_that_is_cancelled_says_nothing_of_the_engine(
    network: NativeNetwork, built: Engine, tmp_path: Path
) -> None:
    not_run_here(built, tmp_path / "library", negate)

    def run(*_: object) -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(for_gpu(network), Library([tmp_path / "library"]), lambda *_: None, run=run)
    assert state(tmp_path / "library", HERE)[0] == UNCHECKED


def test_checks_look_at_the_ends_of_the_profile_and_stay_small_on_a_cpu() -> None:
    on_gpu = ANY.examples(PROFILE).extremes
    assert [(sizes["B"], sizes["H"]) for sizes in on_gpu] == [(1, 4), (2, 8), (2, 12)]
    large = {**PROFILE.to_json(), "H": [4, 64, 128], "W": [4, 64, 128], "B": [1, 2, 16], "HB": [1, 1, 16]}
    profile = type(PROFILE).from_json(large)
    assert [(s["B"], s["HB"]) for s in ANY.examples(profile).extremes_on_cpu] == [(1, 1), (2, 1), (1, 1)]
    assert [(s["B"], s["HB"]) for s in ANY.examples(profile).extremes] == [(1, 1), (2, 1), (16, 16)]


def test_what_is_found_out_in_a_library_that_became_read_only_counts(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path / "library")
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, gpu="sm_80 A"))
    with read_only(tmp_path / "library"):
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.CHECKED, gpu="sm_89 B"))
        assert trust.flaw(engine, "sm_89 B") is None
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.REFUSED, "it differs from native by 2.0"))
        assert trust.flaw(engine).reason is Reason.BROKEN_ENGINE
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.CHECKED, gpu="sm_80 A"))
    assert trust.flaw(engine, "sm_80 A") is None, "what is written last, wherever"


def test_a_check_whose_process_is_killed_says_nothing_of_the_engine(
    network: NativeNetwork, built: Engine, tmp_path: Path
) -> None:
    not_run_here(built, tmp_path / "library", lambda _folder: None)

    def run(task: dict, progress: Callable, *rest: object) -> dict:
        def kill(phase: str, fraction: float) -> None:
            for child in children() if phase == "running native" else ():
                child.kill()
            progress(phase, fraction)

        return run_in_worker(on_cpu(task), kill, *rest)

    with pytest.raises(BuildError, match="was ended by SIGKILL"):
        build_engine(for_gpu(network), Library([tmp_path / "library"]), lambda *_: None, run=run)
    assert state(tmp_path / "library", HERE)[0] == UNCHECKED
