"""Backends whose engines are for one size, as TensorRT 8.6's are. ONNX Runtime is said to be such a backend here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
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
from hybrid_trt.native_model.network import NativeNetwork
from hybrid_trt.nodes import building
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
    return EngineHandle(net, choice, Library([folder]), f"{net.module!r:.9}{folder}", "key")


def build(handle: EngineHandle) -> Engine:
    ((order, _anew),) = building._orders(handle)
    return builder.build_engine(order, handle.library, lambda *_: None, run=builder.run_here)


@pytest.mark.parametrize(("version", "one"), [("8.6.0", True), ("10.13.3.9", False), ("11.0.0", False)])
def test_tensorrt_8_alone_builds_for_one_size(version: str, one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(FULL), "version", lambda _self: version)
    assert FULL.one_size is one


def test_its_builds_want_the_main_memory_that_they_were_measured_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    (measured,) = [row for row in json.loads(MEASURED.read_text())["of_several_sizes"] if "peak_host_gb" in row]
    weights = 722_600_000  # of that ControlNet; they are mapped, and part of what was measured
    for version, enough in (("8.6.0", True), ("10.13.3.9", False)):
        monkeypatch.setattr(type(FULL), "version", lambda _self, version=version: version)
        needed = main_memory.needed_bytes(FULL, weights)
        assert (needed >= measured["peak_host_gb"] * 1e9 - weights) is enough, version


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
        opened = handle_of(net, tmp_path, *pictures).session.engine
        assert opened.folder == engine.folder


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
