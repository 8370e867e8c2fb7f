"""Only what this machine built serves: an engine's key is a hash that anybody can compute."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builds import order, read_only, small_network
from compiling import COMPILES
from fake_engine import publish_engine, query_of
from hybrid_trt.architectures.shapes import Profile, Range
from hybrid_trt.architectures.sizes import ANY
from hybrid_trt.backends import backends
from hybrid_trt.backends.lookup import look_up_known, refusals
from hybrid_trt.backends.torch_inductor.compiled import file_name
from hybrid_trt.comfy_model.hash_cache import source_changed
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder import check
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.resources import on_cpu
from hybrid_trt.engine_library import (
    BuildError,
    Engine,
    EngineQuery,
    Library,
    Manifest,
    Reason,
    Unavailable,
    fleet_key,
    trust,
)
from hybrid_trt.engine_library.engine import describe_files
from hybrid_trt.engine_library.inventory import BROKEN, READY, STALE, UNCHECKED, entries
from hybrid_trt.engine_library.manifest import RECORD_NAME
from hybrid_trt.sampling.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.sampling.engine_status import lacks_engine, status

PROFILE = Profile({"B": Range(1, 2, 2), "H": Range(4, 8, 12), "W": Range(4, 8, 12), "T": Range(77, 77, 77)})


@pytest.fixture(autouse=True)
def key_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own for each test."""
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "keys"))
    return tmp_path / "keys" / "hybrid-trt"


HERE = "sm_80 A"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for a GPU, which the CPU stands for."""
    for module in (builder, check):
        monkeypatch.setattr(module, "gpu_of", lambda _device: HERE)


def state(root: Path, gpu: str = "") -> tuple[str, str]:
    (entry,) = entries(Library([root]), lambda _: None, source_changed, gpu)
    return entry.state, entry.reason


def test_a_signature_holds_on_this_machine_only(key_folder: Path) -> None:
    assert not trust.is_signed("text", "0" * 64), "no signature, no secret"
    signature = trust.sign("text")
    assert trust.is_signed("text", signature)
    assert not trust.is_signed("other", signature)
    assert not trust.is_signed("text", None)
    key = key_folder / "local.key"
    assert key.stat().st_mode & 0o077 == 0
    key.unlink()
    assert not trust.is_signed("text", signature), "another machine"
    assert trust.sign("text") != signature


@pytest.mark.fault("this machine's key is empty or of the wrong length",
                   see="normal speed: *outdated engine*; a build makes a new key")
@pytest.mark.parametrize("contents", [b"", b"\0" * 31, b"\0" * 33], ids=["empty", "short", "long"])
def test_a_secret_that_is_none_is_not_used_and_replaced(key_folder: Path, contents: bytes) -> None:
    """Everybody can sign with an empty one."""
    key_folder.mkdir(parents=True)
    (key_folder / "local.key").write_bytes(contents)
    assert trust.key_stamp() is None
    assert not trust.is_signed("text", fleet_key.digest(contents, "text"))
    signature = trust.sign("text")
    assert trust.is_signed("text", signature)
    key = key_folder / "local.key"
    assert (len(key.read_bytes()), key.stat().st_mode & 0o077) == (32, 0)
    assert [p.name for p in key_folder.iterdir()] == ["local.key"]


@pytest.mark.parametrize("name", ["model.onnx", "B2-H64-W64.bin", "engine.trt"])
def test_what_was_built_here_serves_and_what_came_from_elsewhere_is_to_be_built_again(
    tmp_path: Path, name: str
) -> None:
    publish_engine(tmp_path / "mine", name=name)
    assert state(tmp_path / "mine") == (READY, "")
    engine = publish_engine(tmp_path / "foreign", name=name, made_here=False)
    found, reason = state(tmp_path / "foreign")
    assert (found, "was not built on this machine" in reason) == (STALE, True)
    library = Library([tmp_path / "foreign"])
    with pytest.raises(Unavailable) as refused:
        library.find(query_of(engine), lambda _: None)
    assert refused.value.fallback.reason is Reason.STALE_ENGINE
    assert "build it again" in refused.value.fallback.sentence()
    assert library.unchecked(query_of(engine), lambda _: None) is None, "no check makes it serve"


@pytest.mark.fault("a compiled file lies under a name that its backend never writes",
                   see="normal speed: *damaged engine*; it is never opened")
@pytest.mark.parametrize("made_here", [True, False])
@pytest.mark.parametrize(("backend", "name"), [
    ("tensorrt", "engine.data"), ("tensorrt", "plan"), ("tensorrt", "model.onnx"), ("tensorrt_rtx", "engine.data"),
    ("onnxruntime", "engine.trt"), ("torch", "engine.data"), ("torch", "model.onnx"), ("torch", "b2.bin"),
])  # fmt: skip
def test_an_engine_with_a_file_of_a_name_that_its_backend_never_writes_is_broken(
    tmp_path: Path, backend: str, name: str, made_here: bool
) -> None:
    engine = publish_engine(tmp_path, name=name, backend=backend, made_here=made_here)
    (entry,) = entries(Library([tmp_path]), refusals(torch.device("cpu")), source_changed)
    assert (entry.state, f"has a file {name}" in entry.reason) == (BROKEN, True)
    made = engine.manifest.identity
    wanted = EngineQuery(made.architecture, [made.weights], made.precision, made.profile)
    found = look_up_known(Library([tmp_path]), wanted, backend, torch.device("cpu"))
    assert [*found.engines, *found.live_engines] == []
    assert (found.backend is None) is (backend != "torch"), "live weights serve without one"


@pytest.mark.fault("this machine's key is lost", see="normal speed: *outdated engine*; build again")
@COMPILES
def test_an_engine_whose_secret_is_lost_is_told_on_the_node_and_built_anew(tmp_path: Path, key_folder: Path) -> None:
    net, library, steps = small_network(), Library([tmp_path / "library"]), []

    def compiler(task: dict, *_: object) -> dict:
        steps.append(task["step"])
        name = file_name("BHWT")
        (Path(task["folder"]) / name).write_bytes(b"what Inductor made")
        return {"files": [name], "parity": {"rel_err": 0.0}, "seconds": {}}

    def build() -> Engine:
        return build_engine(order(net, backends()["torch"], PROFILE), library, lambda *_: None, run=compiler)

    engine = build()
    assert build() == engine
    handle = EngineHandle.look_up(net, EngineChoice(PROFILE, backend="torch"), library, "node")
    assert handle.session.engines == [engine]
    assert "not used" not in status(handle)

    shutil.rmtree(key_folder)
    handle.refresh()
    assert handle.session.engines == []
    assert re.search(rf"not used.*not built on this machine.*{trust.FOLDER_VARIABLE}", status(handle))
    assert lacks_engine(handle)
    assert state(tmp_path / "library")[0] == STALE
    build()
    assert steps == ["compile", "compile"]
    handle.refresh()
    assert "not used" not in status(handle)


def test_machines_that_share_a_key_folder_trust_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = publish_engine(tmp_path / "one")
    shutil.copytree(engine.folder, tmp_path / "two" / engine.folder.name)
    assert state(tmp_path / "two") == (READY, "")
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "other keys"))
    assert state(tmp_path / "two")[0] == STALE


@pytest.mark.fault("an engine was only checked here, by an earlier version", see="normal speed: *outdated engine*")
def test_an_engine_that_an_earlier_version_only_checked_is_to_be_built_again(tmp_path: Path) -> None:
    """It may be a stranger's: a forged engine could pass that check."""
    engine = publish_engine(tmp_path)
    trust.keep(engine.folder, engine.manifest, trust.Record("checked"))
    assert state(tmp_path)[0] == STALE


@pytest.mark.fault("a record is copied to another engine, or a manifest is edited",
                   see="normal speed: *outdated engine*")
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
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT))
        assert trust.why_unusable(engine) is None
    assert not (engine.folder / RECORD_NAME).exists()
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(trust.FOLDER_VARIABLE, str(tmp_path / "a file"))
    assert trust.why_unusable(engine).reason is Reason.STALE_ENGINE, "another machine"
    with caplog.at_level(logging.WARNING):
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT))
    assert trust.FOLDER_VARIABLE in caplog.text
    assert trust.why_unusable(engine) is None, "until this process ends"


@pytest.mark.fault("a manifest names a path on a stranger's server", see="nothing: the path is not looked at")
def test_a_path_from_elsewhere_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows a look at \\\\server\\share sends the user's credentials there."""
    source = {"path": "\\\\evil\\share\\a.safetensors", "size": 1, "mtime_ns": 1}
    publish_engine(tmp_path, source=source, made_here=False)
    with monkeypatch.context() as patch:
        patch.setattr("os.stat", _no_network(os.stat))
        assert state(tmp_path)[0] == STALE


def _no_network(real: Callable) -> Callable:
    def stat(path: object, *arguments: object, **options: object) -> object:
        assert "evil" not in str(path)
        return real(path, *arguments, **options)

    return stat


@pytest.mark.fault("this machine's key is changed while ComfyUI runs",
                   see="normal speed: *outdated engine*; build again")
@pytest.mark.parametrize("kept", [True, False], ids=["in the library", "in memory"])
def test_what_a_key_signed_that_was_replaced_counts_no_more(
    kept: bool, tmp_path: Path, key_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the new key may have the old one's time."""
    engine = publish_engine(tmp_path / "library")
    if not kept:
        (engine.folder / RECORD_NAME).unlink()
        monkeypatch.setattr(trust, "write_file", _fails)
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT))
    assert trust.built_here(engine)
    key, stat = key_folder / "local.key", (key_folder / "local.key").stat()
    key.write_bytes(os.urandom(trust.KEY_LENGTH))
    os.utime(key, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not trust.built_here(engine)


def _fails(*_: object, **__: object) -> None:
    raise OSError("read-only")


@pytest.mark.fault("a signature has other characters than a signature's", see="normal speed: *outdated engine*")
@pytest.mark.parametrize("signature", ["\xe4" * 64, "\ud800" * 64, "0" * 63 + "\u0660"],
                         ids=["letters", "halves", "digits"])  # fmt: skip
def test_a_signature_of_any_characters_is_none(signature: str, tmp_path: Path) -> None:
    trust.sign("make the key")
    assert not trust.is_signed("text", signature)
    assert trust.unseal(b"\xff" * 64 + b"contents", "tactics") is None
    engine = publish_engine(tmp_path)
    path = engine.folder / RECORD_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"signature": signature}))
    assert trust.why_unusable(engine).reason is Reason.STALE_ENGINE
    assert state(tmp_path)[0] == STALE


@pytest.fixture(scope="module")
def network() -> NativeNetwork:
    return small_network()


@pytest.fixture(scope="module")
def built(network: NativeNetwork, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of ONNX Runtime, built somewhere."""
    library = Library([tmp_path_factory.mktemp("somewhere")])
    made = order(network, backends()["onnxruntime"], PROFILE)
    return build_engine(made, library, lambda *_: None, run=run_here)


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




def copied(engine: Engine, root: Path, change: Callable[[Path], None], signed: bool = True) -> Engine:
    """An engine with the true key and true hashes of whatever files it has now, as built without a GPU."""
    library = Library([root])
    with library.building_folder() as folder:
        for name in engine.manifest.files:
            shutil.copy(engine.folder / name, folder)
        change(folder)
        manifest = engine.manifest.to_json()
        manifest["files"] = {n: f.__dict__ for n, f in describe_files(folder, list(engine.manifest.files)).items()}
        made = library.publish(folder, Manifest.from_json(manifest))
    if not signed:
        (made.folder / RECORD_NAME).unlink()
    return made


def build(network: NativeNetwork, root: Path, steps: list[str]) -> Engine:
    def run(task: dict, *rest: object) -> dict:
        steps.append(task["step"])
        return run_here(task, *rest)

    made = order(network, backends()["onnxruntime"], PROFILE)
    return build_engine(made, Library([root]), lambda *_: None, run=run)


@pytest.mark.fault("a forged engine carries the true key and true hashes",
                   see="normal speed: *outdated engine*; a build replaces it")
def test_a_forged_engine_with_the_true_key_never_runs_and_is_built_anew(
    network: NativeNetwork, built: Engine, tmp_path: Path
) -> None:
    forged = copied(built, tmp_path, negate, signed=False)
    assert forged.manifest.identity == built.manifest.identity, "its key is the true one"
    assert state(tmp_path)[0] == STALE
    steps: list[str] = []
    replaced = build(network, tmp_path, steps)
    assert steps == ["export"]
    assert replaced.folder == forged.folder
    assert replaced.manifest.files["model.onnx"] == built.manifest.files["model.onnx"]
    assert state(tmp_path) == (READY, "")


@pytest.mark.fault("an engine computes something else than the normal model",
                   see="an error in one sentence, with the difference; normal speed")
@pytest.mark.parametrize(("change", "figure"), [(negate, "2.00e+00"), (to_nan, "inf")])
def test_an_engine_that_computes_something_else_on_its_device_is_refused_with_figures_and_built_anew(
    network: NativeNetwork, built: Engine, tmp_path: Path, on_gpu: None, change: Callable[[Path], None], figure: str
) -> None:
    root, figure = tmp_path / "library", f"differs from the normal model by {figure}"
    engine = copied(built, root, change)
    assert state(root, HERE)[0] == UNCHECKED
    steps: list[str] = []
    with pytest.raises(BuildError) as refused:
        build(network, root, steps)
    assert figure in str(refused.value)
    assert "build again" in str(refused.value)
    found, reason = state(root, HERE)
    assert (found, figure in reason) == (BROKEN, True)
    if change is negate:
        assert build(network, root, steps).folder == engine.folder
        assert steps == ["check", "export", "check"]
        assert state(root, HERE) == (READY, "")


def test_an_honest_engine_is_checked_once_and_serves_from_then_on(
    network: NativeNetwork, built: Engine, tmp_path: Path, on_gpu: None
) -> None:
    root = tmp_path / "library"
    engine = copied(built, root, lambda _: None)
    steps: list[str] = []
    assert build(network, root, steps) == engine
    assert build(network, root, steps) == engine
    assert steps == ["check"]
    assert state(root, HERE) == (READY, "")
    record = trust.record_of(engine)
    assert (record.verdict, record.gpu) == (trust.BUILT, HERE)
    assert 0 < record.parity["rel_err"] <= 1e-4
    assert {case["symbols"]["t"] for case in record.parity["cases"]} == {50, 900}
    assert {case["symbols"]["H"] for case in record.parity["cases"]} == {4, 8, 12}
    assert sorted(p.name for p in root.iterdir() if p.suffix != ".json") == [engine.folder.name]


def test_an_engine_that_cannot_be_opened_is_refused(
    network: NativeNetwork, built: Engine, tmp_path: Path, on_gpu: None
) -> None:
    copied(built, tmp_path / "library", lambda folder: (folder / "model.onnx").write_bytes(b"\x08engine"))
    with pytest.raises(BuildError, match="could not be run"):
        build(network, tmp_path / "library", [])
    assert state(tmp_path / "library", HERE)[0] == BROKEN


def test_a_check_that_is_cancelled_says_nothing_of_the_engine(
    network: NativeNetwork, built: Engine, tmp_path: Path, on_gpu: None
) -> None:
    copied(built, tmp_path / "library", negate)

    def run(*_: object) -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(order(network, backends()["onnxruntime"], PROFILE), Library([tmp_path / "library"]),
                     lambda *_: None, run=run)  # fmt: skip
    assert state(tmp_path / "library", HERE)[0] == UNCHECKED


def test_checks_look_at_the_ends_of_the_profile_and_stay_small_on_a_cpu() -> None:
    on_gpu = ANY.examples(PROFILE).extremes
    assert [(sizes["B"], sizes["H"]) for sizes in on_gpu] == [(1, 4), (2, 8), (2, 12)]
    large = {**PROFILE.to_json(), "H": [4, 64, 128], "W": [4, 64, 128], "B": [1, 2, 16], "HB": [1, 1, 16]}
    extremes = ANY.examples(type(PROFILE).from_json(large)).extremes
    assert [(s["B"], s["HB"]) for s in on_cpu(ANY, extremes, extremes[0])] == [(1, 1), (2, 1)]
    assert [(s["B"], s["HB"]) for s in extremes] == [(1, 1), (2, 1), (16, 16)]


def test_what_is_found_out_in_a_library_that_became_read_only_counts(tmp_path: Path) -> None:
    engine = publish_engine(tmp_path / "library")
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, gpu="sm_80 A"))
    with read_only(tmp_path / "library"):
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, gpu="sm_89 B"))
        assert trust.why_unusable(engine, "sm_89 B") is None
        trust.keep(engine.folder, engine.manifest, trust.Record(trust.REFUSED, "it differs by 2.0"))
        assert trust.why_unusable(engine).reason is Reason.BROKEN_ENGINE
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.BUILT, gpu="sm_80 A"))
    assert trust.why_unusable(engine, "sm_80 A") is None, "what is written last, wherever"
