"""Backends whose engines are for one size, as TensorRT 8.6's are. ONNX Runtime is said to be such a backend here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import patched as patched_models
import pytest
import slow
import torch
from fake_engine import publish_engine
from hybrid_trt.architectures.shapes import Picture, Profile, Range
from hybrid_trt.backends import AUTO, backends, lookup
from hybrid_trt.backends.tensorrt import version8
from hybrid_trt.backends.tensorrt.version8.backend import BACKEND as VERSION8
from hybrid_trt.backends.tensorrt.version8.runner import Version8Engine
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_builder import build as builder
from hybrid_trt.engine_builder.jobs import BuildQueue
from hybrid_trt.engine_library import EngineQuery, Reason
from hybrid_trt.engine_library.library import _rank
from hybrid_trt.nodes import building
from hybrid_trt.nodes.engine_nodes import TRTSamplerPatch
from hybrid_trt.page_api import node_states, picture_fit
from hybrid_trt.page_api.node_states import NodeStates
from hybrid_trt.page_api.outlook import NodeRequest
from hybrid_trt.sampling.call_stats import ever_uncovered
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.engine_status import lacks_engine, requested_calls, status
from hybrid_trt.sampling.report import report_text
from hybrid_trt.sessions.session import refuse
from one_size import BEST, OF_PORTRAIT, PORTRAIT, PROFILE, build, built_for, handle_of, of_one_size, only, serve
from small_networks import network

ORT, FULL = backends()["onnxruntime"], backends()["tensorrt"]

__all__ = ["of_one_size"]  # a fixture


@pytest.fixture(params=slow.cases({"unet": "unet", "controlnet": "controlnet"}, ["controlnet"]))
def net(request: pytest.FixtureRequest) -> NativeNetwork:
    return network(request.param, "unlike_levels")


def page_state(handle: EngineHandle, *pictures: Picture) -> dict[str, Any]:
    """The page's words on a node."""
    states = NodeStates(handle.library, BuildQueue())
    states.learn("key", handle)
    return states.state("key", NodeRequest("unet", handle.network.label, False, "onnxruntime", pictures=pictures))


def test_tensorrt_8_alone_builds_for_one_size() -> None:
    assert VERSION8.engine_profile(PROFILE) == only(PROFILE.sizes("opt"))
    assert FULL.engine_profile(PROFILE) == PROFILE


@pytest.mark.parametrize(("version", "ours"), [("8.6.0", True), ("10.13.3.9", False), ("11.0.0", False), (None, False)])
def test_the_package_that_is_installed_says_which_version_serves(
    version: str | None, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        described = tmp_path / f"tensorrt-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert version8.is_installed() is ours


@pytest.mark.parametrize(("pictures", "sizes"), slow.cases(
    {"square": ((), BEST), "portrait": ((PORTRAIT,), OF_PORTRAIT)}, ["square"]))
def test_an_engine_is_for_the_graphs_picture_and_other_sizes_are_natives(
    net: NativeNetwork, pictures: tuple, sizes: dict[str, int], tmp_path: Path
) -> None:
    handle, (engine,) = built_for(net, tmp_path, pictures)
    profile = engine.manifest.identity.profile
    assert profile == only({s: n for s, n in sizes.items() if s in profile.ranges})
    assert not lacks_engine(handle), "there is no larger engine to be had"
    assert "smaller" not in status(handle)

    served, result = serve(handle, sizes)
    assert served
    assert result <= 1e-5
    served, _ = serve(handle, {**sizes, "B": 1})
    assert not served
    assert list(handle.stats.reasons) == [Reason.SHAPE_OUTSIDE_PROFILE.value]


def test_a_node_with_such_an_engine_is_ready_and_asks_for_no_larger_one(tmp_path: Path) -> None:
    handle, _ = built_for(network("unet", "unlike_levels"), tmp_path, (PORTRAIT,))
    state = page_state(handle, PORTRAIT)
    assert state["state"] == "ready"
    assert state["engine"]["covers"]
    assert state["engine"]["profile"] == "batch 2, 96 x 128 px, 77 tokens"
    assert state["misfit"] is state["uncompiled"] is None


def test_a_backend_that_was_never_tried_says_so_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, _ = built_for(network("unet", "unlike_levels"), tmp_path, ())
    assert "experimental" not in status(handle)
    monkeypatch.setattr(type(ORT), "notice", FULL.notice)
    assert "onnxruntime is experimental: never run on a GPU by us" in status(handle)
    assert not VERSION8.notice


def test_another_picture_wants_an_engine_of_its_own_beside_the_first(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    first = build(handle_of(net, tmp_path))
    handle = handle_of(net, tmp_path, PORTRAIT)
    assert lacks_engine(handle)
    second = build(handle)
    assert {e.folder for e in handle.library.engines()} == {first.folder, second.folder}
    for pictures, engine in (((), first), ((PORTRAIT,), second)):
        opened = handle_of(net, tmp_path, *pictures).session
        assert opened.engines[0].folder == engine.folder
        assert opened.engines[0].manifest.identity.profile == engine.manifest.identity.profile


def test_a_graph_whose_picture_has_no_engine_is_not_said_to_be_all_on_engines(
    models: dict[str, Path], tmp_path: Path
) -> None:
    native = patched_models.load(models[patched_models.NAME])
    handle = handle_of(NativeNetwork.of_model(native, "unet"), tmp_path)
    said = TRTSamplerPatch.execute(native, handle).ui
    assert said["native"] == [True], "there is no engine"
    handle, _ = built_for(handle.network, tmp_path, ())
    assert TRTSamplerPatch.execute(native, handle).ui["native"] == [False]
    portrait = handle_of(handle.network, tmp_path, PORTRAIT)
    said = TRTSamplerPatch.execute(native, portrait).ui
    assert said["native"] == [True]
    assert "Each engine takes one size: pictures of other sizes run at normal speed" in said["text"][0]
    portrait, _ = built_for(handle.network, tmp_path, (PORTRAIT,))
    assert TRTSamplerPatch.execute(native, portrait).ui["native"] == [False]


def test_all_pictures_of_a_graph_are_built_for_and_only_what_lacks(tmp_path: Path) -> None:
    net = network("unet", "unlike_levels")
    square = Picture(64, 64, (2, 1))
    build(handle_of(net, tmp_path, square))
    handle = handle_of(net, tmp_path, square, PORTRAIT)
    assert lacks_engine(handle)
    ((order, anew),) = building._orders(handle)
    assert not anew
    assert order.profile.sizes("opt") == OF_PORTRAIT
    builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here)
    handle.refresh()
    assert not lacks_engine(handle)
    assert [(order.profile.sizes("opt"), anew) for order, anew in building._orders(handle)] == [
        (BEST, True), (OF_PORTRAIT, True)], "asked for all the same, it builds all again"
    refuse(handle.session.engines[1], "damaged")
    ((order, anew),) = building._orders(handle)
    sizes = handle.session.engines[1].manifest.identity.profile.sizes("opt")
    assert sizes.items() <= order.profile.sizes("opt").items()


def test_the_page_tells_of_all_engines_of_a_node(tmp_path: Path) -> None:
    handle, _ = built_for(network("unet", "unlike_levels"), tmp_path, (), (PORTRAIT,))
    found = page_state(handle)["engine"]
    assert found["covers"]
    assert found["profile"] == "batch 2, 96 x 128 px, 77 tokens; batch 2, 64 px, 77 tokens"
    assert len(found["names"]) == 2
    assert found["bytes"] == sum(engine.manifest.bytes for engine in handle.library.engines())


@slow.when("square")
@pytest.mark.parametrize("pictures", [(), (PORTRAIT,)], ids=["square", "portrait"])
def test_a_longer_prompt_gets_an_engine_of_its_own_after_the_run_that_showed_it(
    net: NativeNetwork, pictures: tuple, tmp_path: Path
) -> None:
    usual = OF_PORTRAIT if pictures else BEST
    handle, _ = built_for(net, tmp_path, pictures)
    before = ever_uncovered()
    for tokens in (154, 154, 308):
        assert serve(handle, {**usual, "T": tokens}) == (False, 0.0)
    assert ever_uncovered() == before + 1, "the node runs again and builds; 308 tokens are more than it was to take"
    told = f"{8 * usual['W']}x{8 * usual['H']}, 154 tokens"
    assert f"-> Build again for {told}".lower() in report_text([handle.stats]).lower()

    assert lacks_engine(handle)
    ((order, anew),) = building._orders(handle)
    assert not anew
    assert order.profile == only({**usual, "T": 154})
    builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here)
    handle.refresh()
    assert not lacks_engine(handle)
    for tokens in (154, 77, 154):
        served, error = serve(handle, {**usual, "T": tokens})
        assert served
        assert error <= 1e-5


def test_of_many_sizes_in_one_run_those_of_most_calls_get_engines(tmp_path: Path) -> None:
    handle, _ = built_for(network("unet", "unlike_levels"), tmp_path, ())
    calls = {154: 3, 231: 2}
    for tokens, count in {**calls, 77: 1}.items():
        for _ in range(count):
            serve(handle, {**BEST, "T": tokens, "B": 1 if tokens == 77 else 2})
    parts = ORT.to_build(handle.network, requested_calls(handle), ())
    wanted = [part.profile.sizes("opt") for part in parts]
    assert wanted == [BEST, *({**BEST, "T": tokens} for tokens in calls)]


def test_the_page_offers_to_build_for_what_ran_native_and_knows_the_pictures_that_have_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = network("unet", "unlike_levels")
    handle, _ = built_for(net, tmp_path, (PORTRAIT,))
    serve(handle, {**OF_PORTRAIT, "T": 154})
    (told,) = [record.getMessage() for record in caplog.records if "ran at normal speed" in record.getMessage()]
    assert told.endswith("Same picture, normal speed; build again for 96x128, 154 tokens.")
    (lacking,) = node_states._uncovered([handle.stats])
    assert lacking == {"size": "96x128, 154 tokens", "graph": False, "native": True, "count": 1}
    pictures = (PORTRAIT, Picture(64, 96, (2,), 1))
    found = page_state(handle, *pictures)
    wish = NodeRequest("unet", handle.network.label, False, "onnxruntime", pictures=pictures)
    assert found["engine"]["covers"]
    assert (found["misfit"], found["uncompiled"]) == (None, {"width": 64, "height": 96, "images": 1})
    family, engines = net.architecture().name, handle.session.engines
    by_auto = picture_fit.size_report(wish, family, engines, AUTO, any_size=True, tokens=0)
    assert by_auto["uncompiled"] is None, "what live weights have files for is not known here"


def test_an_engine_of_the_best_size_counts_as_all_that_is_wanted(tmp_path: Path) -> None:
    """Else a slower engine of another backend that takes all sizes would be preferred under ``auto``."""
    engine = publish_engine(tmp_path)
    made = engine.manifest.identity
    wider = Profile({"B": Range(1, 2, 9)})
    wanted = EngineQuery(made.architecture, [made.weights], made.precision, wider, [made.backend])
    not_covered, *_ = _rank(engine, wanted, None)
    assert not_covered
    assert lookup._covers(ORT, engine, wanted)
    handle = handle_of(network("unet", "unlike_levels"), tmp_path, PORTRAIT, backend=AUTO)
    assert lookup.wanted_profile(handle.network, handle.choice) == PROFILE, "auto asks for what the node says"


def test_version_8_takes_weights_where_they_are() -> None:
    given: list[Any] = []
    trt = SimpleNamespace(Weights=given.append)
    tensor = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    Version8Engine._as_weights(SimpleNamespace(_trt=trt), tensor)
    assert isinstance(given[0], numpy.ndarray)
    assert given[0].ctypes.data == tensor.data_ptr()
    assert given[0].dtype == numpy.float16
