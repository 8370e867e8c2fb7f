"""Backends whose engines are for one size, as TensorRT 8.6's are. ONNX Runtime is said to be such a backend here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import patched as patched_models
import pytest
import sampling
import torch
from fake_engine import publish_engine
from pack import import_comfy
from small_networks import native_call, network

import_comfy()

from hybrid_trt.architectures.calls import EngineCall
from hybrid_trt.architectures.samples import sample_inputs
from hybrid_trt.architectures.sizes import Picture
from hybrid_trt.architectures.tensors import Profile, Range
from hybrid_trt.backends import AUTO, backends
from hybrid_trt.backends.tensorrt import version8
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder import main_memory
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Engine, Library, Reason, Unavailable, Wanted
from hybrid_trt.engine_library.library import _rank
from hybrid_trt.engine_library.parity import relative_error
from hybrid_trt.engine_runtime.engine_handle import EngineChoice, EngineHandle
from hybrid_trt.engine_runtime.ledger import ever_uncompiled
from hybrid_trt.engine_runtime.report_words import report_text
from hybrid_trt.engine_sessions import several_sizes
from hybrid_trt.engine_sessions.backed_by_live import backed_by_live
from hybrid_trt.engine_sessions.session import refusal_of, refuse
from hybrid_trt.native_model.network import NativeNetwork
from hybrid_trt.nodes import building
from hybrid_trt.nodes.sampler_patch import TRTSamplerPatch
from hybrid_trt.page_api import node_states
from hybrid_trt.page_api.node_states import NodeStates
from hybrid_trt.page_api.outlook import Wish

MEASURED = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "tensorrt86_h200.json"
ORT, FULL = backends()["onnxruntime"], backends()["tensorrt"]
PROFILE = Profile({"B": Range(1, 2, 4), "H": Range(4, 8, 20), "W": Range(4, 8, 20), "T": Range(77, 77, 231),
                   "HB": Range(1, 1, 4)})
BEST = {"B": 2, "H": 8, "W": 8, "T": 77, "HB": 1}
PORTRAIT = Picture(96, 128, (2, 1))
OF_PORTRAIT = {**BEST, "H": 16, "W": 12}


def only(sizes: dict[str, int]) -> Profile:
    return Profile({s: Range(n, n, n) for s, n in sizes.items()})


@pytest.fixture(autouse=True)
def of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ORT), "one_size", True)


@pytest.fixture(params=["unet", "controlnet"])
def net(request: pytest.FixtureRequest) -> NativeNetwork:
    return network(request.param, "unlike_levels")


def handle_of(net: NativeNetwork, folder: Path, *pictures: Picture, backend: str = "onnxruntime") -> EngineHandle:
    choice = EngineChoice(PROFILE, backend=backend, pictures=pictures)
    return EngineHandle(net, choice, Library([folder]), f"{net.module!r:.9}{folder}", f"key {folder}")


def build(handle: EngineHandle) -> Engine:
    ((order, _anew),) = building._orders(handle)
    return builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here)


@pytest.mark.parametrize(("version", "one"), [("8.6.0", True), ("10.13.3.9", False), ("11.0.0", False)])
def test_tensorrt_8_alone_builds_for_one_size(version: str, one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(FULL), "version", lambda _self: version)
    assert FULL.one_size is one


def test_its_builds_want_the_main_memory_that_they_were_measured_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = json.loads(MEASURED.read_text())
    peaks = [(row["case"], row["tensorrt_peak_host_gb"]) for row in figures["builds"] if "tensorrt_peak_host_gb" in row]
    peaks += [("controlnet", row["peak_host_gb"]) for row in figures["of_several_sizes"] if "peak_host_gb" in row]
    assert len(peaks) == 4
    for case, peak in peaks:
        weights = 722_600_000 if "controlnet" in case else 1_719_000_000  # mapped, and part of what was measured
        for version, enough in (("8.6.0", True), ("10.13.3.9", False)):
            monkeypatch.setattr(type(FULL), "version", lambda _self, version=version: version)
            needed = main_memory.needed_bytes(FULL, weights)
            assert (needed >= peak * 1e9 - weights) is enough, (case, version)


def test_without_the_package_nothing_is_said_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_self: object) -> str:
        raise Unavailable(Reason.BACKEND_MISSING, "it is not installed")

    monkeypatch.setattr(type(FULL), "version", missing)
    assert FULL.one_size is False
    assert not any(backend.one_size for name, backend in backends().items() if name != "onnxruntime")


@pytest.mark.parametrize(("pictures", "sizes"), [((), BEST), ((PORTRAIT,), OF_PORTRAIT)], ids=["square", "portrait"])
def test_an_engine_is_for_the_graphs_picture_and_other_sizes_are_natives(
    net: NativeNetwork, pictures: tuple, sizes: dict[str, int], tmp_path: Path
) -> None:
    handle = handle_of(net, tmp_path, *pictures)
    engine = build(handle)
    profile = engine.manifest.identity.profile
    assert profile == only({s: n for s, n in sizes.items() if s in profile.ranges})
    handle.refresh()
    assert not handle.lacks, "there is no larger engine to be had"
    assert "smaller" not in handle.status()

    served, result = serve(handle, sizes)
    assert served
    assert result <= 1e-5
    served, _ = serve(handle, {**sizes, "B": 1})
    assert not served
    assert list(handle.tally.reasons) == [Reason.SHAPE_OUTSIDE_PROFILE.value]


def serve(handle: EngineHandle, sizes: dict[str, int]) -> tuple[bool, float]:
    """Whether a call was served, and how far its result is from native's."""
    net = handle.network
    given = sample_inputs(net.architecture().inputs(net.module, "float32"), sizes, seed=3)
    with torch.inference_mode():
        done, result = handle.serve(None, lambda: EngineCall(dict(given), dict), net.patcher)
        if not done:
            return False, 0.0
        expected = native_call(net, given)
    return True, max(relative_error(a, b) for a, b in zip(result.values(), expected, strict=True))


def test_a_node_with_such_an_engine_is_ready_and_asks_for_no_larger_one(tmp_path: Path) -> None:
    handle = handle_of(network("unet", "unlike_levels"), tmp_path, PORTRAIT)
    build(handle)
    handle.refresh()
    states = NodeStates(handle.library, BuildQueue())
    states.learn("key", handle)
    state = states.state("key", Wish("unet", handle.network.label, False, "onnxruntime"))
    assert state["state"] == "ready"
    assert state["engine"]["covers"]
    assert state["engine"]["profile"] == "batch 2, 96 x 128 px, 77 tokens"
    assert state["engine"]["limits"] is None, "the page would say that a square has to fit"


def test_another_picture_wants_an_engine_of_its_own_beside_the_first(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    first = build(handle_of(net, tmp_path))
    handle = handle_of(net, tmp_path, PORTRAIT)
    assert handle.lacks
    second = build(handle)
    assert {e.folder for e in handle.library.engines()} == {first.folder, second.folder}
    for pictures, engine in (((), first), ((PORTRAIT,), second)):
        opened = handle_of(net, tmp_path, *pictures).session
        assert opened.engines[0].folder == engine.folder
        assert opened.profile == engine.manifest.identity.profile


def test_a_graph_whose_picture_has_no_engine_is_not_said_to_be_all_on_engines(
    models: dict[str, Path], tmp_path: Path
) -> None:
    native = patched_models.load(models[patched_models.NAME])
    handle = handle_of(NativeNetwork.of_model(native, "unet"), tmp_path)
    said = TRTSamplerPatch.execute(native, handle).ui
    assert said["native"] == [True], "there is no engine"
    build(handle)
    handle.refresh()
    assert TRTSamplerPatch.execute(native, handle).ui["native"] == [False]
    portrait = handle_of(handle.network, tmp_path, PORTRAIT)
    said = TRTSamplerPatch.execute(native, portrait).ui
    assert said["native"] == [True]
    assert "It is for this size alone: other calls run native" in said["text"][0]
    build(portrait)
    portrait.refresh()
    assert TRTSamplerPatch.execute(native, portrait).ui["native"] == [False]


def test_a_node_serves_all_sizes_that_it_has_engines_for(net: NativeNetwork, tmp_path: Path) -> None:
    build(handle_of(net, tmp_path))
    handle = handle_of(net, tmp_path, PORTRAIT)
    build(handle)
    handle.refresh()
    assert "Other engines serve batch 2, 64 px, 77 tokens" in handle.status()
    names = []
    for sizes in (OF_PORTRAIT, BEST, OF_PORTRAIT, BEST):
        served, error = serve(handle, sizes)
        assert served
        assert error <= 1e-5
        names.append(handle.session.name)
    assert names[:2] == names[2:]
    assert {*names} == {engine.folder.name for engine in handle.session.engines}
    for sizes in ({**BEST, "B": 1}, {**BEST, "T": 154}, {**BEST, "W": 12}):
        served, _ = serve(handle, sizes)
        assert not served, sizes
    assert list(handle.tally.reasons) == [Reason.SHAPE_OUTSIDE_PROFILE.value]
    assert serve(handle, BEST)[0], "a refused call leaves nothing behind"


def test_with_live_weights_behind_them_each_engine_serves_its_size_and_one_that_is_damaged_takes_no_other_with_it(
    tmp_path: Path,
) -> None:
    net = network("unet", "unlike_levels")
    build(handle_of(net, tmp_path))
    handle = handle_of(net, tmp_path, PORTRAIT)
    portrait = build(handle)
    handle.refresh()
    live = backends()["torch"].session(net, [], "float32", None)
    session = backed_by_live(handle.session, live, net)

    def backends_of(*all_sizes: dict[str, int]) -> list[str]:
        found = []
        session.begin_run(net.patcher)
        for sizes in all_sizes:
            given = sample_inputs(net.architecture().inputs(net.module, "float32"), sizes, seed=3)
            session.follow(net, net.patcher)
            with torch.inference_mode():
                (result,), (expected,) = session.run(given).values(), native_call(net, given)
            assert relative_error(result, expected) <= 1e-5
            found.append(session.backend_name)
        return found

    assert session.serves(BEST) is None
    found = backends_of(OF_PORTRAIT, BEST, {**BEST, "W": 10}, BEST)
    assert found == ["onnxruntime", "onnxruntime", "torch", "onnxruntime"]
    session.unload()
    portrait.main_file.write_bytes(bytes(portrait.main_file.stat().st_size))
    assert backends_of(BEST, OF_PORTRAIT, BEST) == ["onnxruntime", "torch", "onnxruntime"]
    assert backends_of(BEST, OF_PORTRAIT) == ["onnxruntime", "torch"]
    assert [engine for engine in session.engines if refusal_of(engine) is not None] == [portrait]
    handle.refresh()
    assert portrait not in handle.session.engines
    assert handle.session.engines


@pytest.mark.parametrize("first", [True, False], ids=["of the node's own size", "of another"])
def test_one_that_is_damaged_leaves_the_others_in_service_by_name_too(first: bool, tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    square = build(handle_of(net, tmp_path))
    handle = handle_of(net, tmp_path, PORTRAIT)
    portrait = build(handle)
    handle.refresh()
    damaged, its_calls, others = (portrait, OF_PORTRAIT, BEST) if first else (square, BEST, OF_PORTRAIT)
    damaged.main_file.write_bytes(bytes(damaged.main_file.stat().st_size))
    with patched_models.sampling_node():
        handle.plan()
        handle.open()  # as ComfyUI does before it samples
        assert handle.fallback is None
        for _ in range(2):
            served, error = serve(handle, others)
            assert served
            assert error <= 1e-5
            assert not serve(handle, its_calls)[0]
        assert (handle.tally.engine, handle.tally.native) == (2, 2)
        assert list(handle.tally.reasons) == [Reason.BROKEN_ENGINE.value]
    shared = handle.session
    with patched_models.sampling_node():  # it is not tried again
        handle.plan()
        assert damaged not in handle.session.engines
        assert serve(handle, others)[0]
    order = replace(building._orders(handle)[0][0], profile=damaged.manifest.identity.profile)
    builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here, again=True)
    with patched_models.sampling_node():
        handle.plan()
        assert handle.session is shared
        assert serve(handle, its_calls)[0]


def test_where_all_are_damaged_the_run_is_natives(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    handles = [handle_of(net, tmp_path), handle_of(net, tmp_path, PORTRAIT)]
    for engine in map(build, handles):
        engine.main_file.write_bytes(bytes(engine.main_file.stat().st_size))
    handle = handles[1]
    handle.refresh()
    with patched_models.sampling_node():
        handle.plan()
        handle.open()
        assert not serve(handle, OF_PORTRAIT)[0]
        assert not serve(handle, BEST)[0]
        assert list(handle.tally.reasons) == [Reason.BROKEN_ENGINE.value]


def test_the_second_pass_of_a_workflow_at_another_size_runs_on_its_own_engine(
    models: dict[str, Path], tmp_path: Path
) -> None:
    native = patched_models.load(models[patched_models.NAME])
    pictures = (Picture(64, 64, (2,)), PORTRAIT)
    patched = patched_models.Patched(native, Library([tmp_path]))
    patched.handle.choice = replace(patched.handle.choice, pictures=pictures)
    for order, _anew in building._orders(patched.handle):
        builder.build_engine(order, patched.handle.library, lambda *_: None, run=builder.run_here)
    served = []
    for size in ((8, 8), (16, 12), (8, 8), (16, 12)):
        latent = patched.sample(size=size)
        assert sampling.error(latent, sampling.sample(native, size=size)) <= 1e-5
        assert patched.counts == (sampling.STEPS, 0)
        served.append(patched.handle.tally.engine_name)
    assert served[:2] == served[2:]
    assert served[0] != served[1]


def test_no_more_engines_of_a_network_are_open_than_a_workflow_uses(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    all_sizes = [BEST, OF_PORTRAIT, {**BEST, "H": 12, "W": 16}]
    for sizes in all_sizes:
        build(handle_of(net, tmp_path, Picture(8 * sizes["W"], 8 * sizes["H"], (2, 1))))
    handle = handle_of(net, tmp_path)
    session = handle.session
    for sizes in all_sizes:
        assert serve(handle, sizes)[0]
    opened = [one.loaded for one in session._sessions]
    assert sum(opened) == several_sizes.MOST_OPEN
    first = next(one for one in session._sessions if one.serves({s: n for s, n in BEST.items() if s != "HB"}) is None)
    assert not first.loaded, "it was used longest ago"
    assert session.bytes == sum(one.bytes for one in session._sessions if one.loaded)
    session.unload()
    assert not session.loaded
    assert serve(handle, BEST)[0]


def test_all_pictures_of_a_graph_are_built_for_and_only_what_lacks(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    square = Picture(64, 64, (2, 1))
    build(handle_of(net, tmp_path, square))
    handle = handle_of(net, tmp_path, square, PORTRAIT)
    assert handle.lacks
    ((order, anew),) = building._orders(handle)
    assert not anew
    assert order.profile.sizes("opt") == OF_PORTRAIT
    builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here)
    handle.refresh()
    assert not handle.lacks
    assert [(order.profile.sizes("opt"), anew) for order, anew in building._orders(handle)] == [
        (BEST, True), (OF_PORTRAIT, True)], "asked for all the same, it builds all again"
    refuse(handle.session.engines[1], "damaged")
    ((order, anew),) = building._orders(handle)
    sizes = handle.session.engines[1].manifest.identity.profile.sizes("opt")
    assert sizes.items() <= order.profile.sizes("opt").items()


def test_the_page_tells_of_all_engines_of_a_node(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    build(handle_of(net, tmp_path))
    handle = handle_of(net, tmp_path, PORTRAIT)
    build(handle)
    handle.refresh()
    states = NodeStates(handle.library, BuildQueue())
    states.learn("key", handle)
    found = states.state("key", Wish("unet", handle.network.label, False, "onnxruntime"))["engine"]
    assert found["covers"]
    assert found["profile"] == "batch 2, 96 x 128 px, 77 tokens; batch 2, 64 px, 77 tokens"
    assert found["limits"] is None, "one's would be taken for those of both"
    assert len(found["names"]) == 2
    assert found["bytes"] == sum(engine.manifest.bytes for engine in handle.library.engines())


@pytest.mark.parametrize("pictures", [(), (PORTRAIT,)], ids=["square", "portrait"])
def test_a_longer_prompt_gets_an_engine_of_its_own_after_the_run_that_showed_it(
    net: NativeNetwork, pictures: tuple, tmp_path: Path
) -> None:
    handle = handle_of(net, tmp_path, *pictures)
    usual = OF_PORTRAIT if pictures else BEST
    build(handle)
    handle.refresh()
    before = ever_uncompiled()
    for tokens in (154, 154, 308):
        assert serve(handle, {**usual, "T": tokens}) == (False, 0.0)
    assert ever_uncompiled() == before + 1, "the node runs again and builds; 308 tokens are more than it was to take"
    told = f"{8 * usual['W']}x{8 * usual['H']}, 154 tokens"
    assert f"-> Build again for {told}".lower() in report_text([handle.tally]).lower()

    assert handle.lacks
    ((order, anew),) = building._orders(handle)
    assert not anew
    assert order.profile == only({**usual, "T": 154})
    builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here)
    handle.refresh()
    assert not handle.lacks
    for tokens in (154, 77, 154):
        served, error = serve(handle, {**usual, "T": tokens})
        assert served
        assert error <= 1e-5


def test_of_many_sizes_in_one_run_those_of_most_calls_get_engines(tmp_path: Path) -> None:
    handle = handle_of(network("unet", "unlike_levels"), tmp_path)
    build(handle)
    handle.refresh()
    calls = {154: 3, 231: 2}
    for tokens, count in {**calls, 77: 1}.items():
        for _ in range(count):
            serve(handle, {**BEST, "T": tokens, "B": 1 if tokens == 77 else 2})
    wanted = [profile.sizes("opt") for profile in handle.profiles]
    assert wanted == [BEST, *({**BEST, "T": tokens} for tokens in calls)]


def test_the_page_offers_to_build_for_what_ran_native_and_knows_the_pictures_that_have_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = network("unet", "unlike_levels")
    handle = handle_of(net, tmp_path, PORTRAIT)
    build(handle)
    handle.refresh()
    serve(handle, {**OF_PORTRAIT, "T": 154})
    (told,) = [record.getMessage() for record in caplog.records if "ran native" in record.getMessage()]
    assert told.endswith("The image is native's, only slower; build again for 96x128, 154 tokens.")
    (lacking,) = node_states._lacking([handle.tally], "unserved")
    assert lacking == {"size": "96x128, 154 tokens", "graph": False, "native": True, "count": 1}
    states = NodeStates(handle.library, BuildQueue())
    states.learn("key", handle)
    found = states.state("key", Wish("unet", handle.network.label, False, "onnxruntime"))["engine"]
    assert found["compiled"] == [{"width": 96, "height": 128, "batch": 2}]
    assert found["covers"]
    by_auto = node_states._union_json(handle.session.engines, replace(states._known["key"], backend=AUTO))
    assert by_auto["compiled"] is None, "what live weights have files for is not known here"


def test_the_command_line_builds_for_the_best_size_too(tmp_path: Path) -> None:
    order = BuildOrder(network("unet", "unlike_levels"), "float32", PROFILE, ORT)
    engine = builder.build_engine(order, Library([tmp_path]), lambda *_: None, run=builder.run_here)
    assert engine.manifest.identity.profile == only({s: n for s, n in BEST.items() if s != "HB"})
    assert "up to" not in order.words()


def test_an_engine_of_the_best_size_counts_as_all_that_is_wanted(tmp_path: Path) -> None:
    """Else a slower engine of another backend that takes all sizes would be preferred under ``auto``."""
    made = publish_engine(tmp_path).manifest.identity
    wanted = Wanted(made.architecture, [made.weights], made.precision, Profile({"B": Range(1, 2, 9)}), [made.backend])
    _slow, not_covered, *_ = _rank(made, wanted, None)
    assert not_covered
    _slow, not_covered, *_ = _rank(made, replace(wanted, one_size=[made.backend]), None)
    assert not not_covered


def test_auto_asks_for_what_the_node_says(tmp_path: Path) -> None:
    handle = handle_of(network("unet", "unlike_levels"), tmp_path, PORTRAIT, backend=AUTO)
    assert handle.profile == PROFILE


def test_version_8_takes_weights_where_they_are() -> None:
    given: list[Any] = []
    trt = SimpleNamespace(Weights=given.append)
    tensor = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    version8.weights(trt, tensor)
    assert isinstance(given[0], numpy.ndarray)
    assert given[0].ctypes.data == tensor.data_ptr()
    assert given[0].dtype == numpy.float16
