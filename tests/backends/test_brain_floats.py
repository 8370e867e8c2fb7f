"""Precision bfloat16 on its way through ONNX: compared with native although ONNX Runtime has no such convolutions."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from builds import PROFILE, small_network
from hybrid_trt.backends import Backend, BuildRequest, Progress, backends
from hybrid_trt.backends.tensorrt.full import BACKEND as FULL
from hybrid_trt.backends.tensorrt.version8.backend import BACKEND as VERSION8
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_builder.worker import onnx_export
from hybrid_trt.engine_library import BuildError, Library
from hybrid_trt.engine_library.engine import LIMITS

ALL = backends()


class TakesGraphs(type(ALL["onnxruntime"])):
    """A backend that takes brain floats, as TensorRT does; it keeps the graph."""

    precisions = ("bfloat16",)


def build(folder: Path, backend: Backend | None = None) -> dict:
    made = BuildOrder(small_network(), "bfloat16", PROFILE, backend or TakesGraphs())
    return dict(build_engine(made, Library([folder]), lambda *_: None, run=run_here).manifest.parity)


def test_its_graph_is_compared_with_native_and_rounds_its_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the backend gets the graph in brain floats."""
    asked = []

    def keep(_self: Backend, request: BuildRequest, _progress: Progress) -> list[str]:
        model = onnx.load_model(str(request.onnx), load_external_data=False)
        asked.append({w.data_type for w in model.graph.initializer} | {i.type.tensor_type.elem_type
                                                                      for i in model.graph.input})
        return [request.onnx.name, request.onnx.name + ".data"]

    monkeypatch.setattr(type(ALL["onnxruntime"]), "build", keep)
    parity = build(tmp_path)
    assert 0 < parity["rel_err"] <= min(LIMITS["bfloat16"], 1e-2)
    assert onnx.TensorProto.BFLOAT16 in asked[0]
    (engine,) = Library([tmp_path]).engines()
    assert not (engine.folder / "float32.onnx").exists()


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attach = onnx_export._attach_weights

    def wrong(graph: onnx.GraphProto, *rest: object) -> dict:
        output = graph.output[0].name
        for node in graph.node:
            for i, name in enumerate(node.output):
                if name == output:
                    node.output[i] = "before"
        graph.node.append(onnx.helper.make_node("Neg", ["before"], [output]))
        return attach(graph, *rest)

    monkeypatch.setattr(onnx_export, "_attach_weights", wrong)
    with pytest.raises(BuildError, match=r"differs from the normal model by 2\.00e\+00"):
        build(tmp_path)


@pytest.mark.parametrize("backend", [ALL["onnxruntime"], VERSION8], ids=["onnxruntime", "TensorRT 8.6"])
def test_who_has_none_says_so_before_anything_is_exported(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend is VERSION8:
        monkeypatch.setattr(type(backend), "version", lambda _self: "8.6.0")
        monkeypatch.setattr(type(backend), "cannot_build", lambda *_: None)
        monkeypatch.setattr(type(backend), "target", lambda *_: "sm_61 a card")
    with pytest.raises(BuildError, match=rf"{backend.name} .* has no bfloat16, .* choose float16 or float32"):
        build(tmp_path, backend)
    assert list(tmp_path.iterdir()) == []


def test_newer_tensorrt_has_them() -> None:
    assert "bfloat16" not in VERSION8.precisions
    assert "bfloat16" in FULL.precisions
    assert "bfloat16" in ALL["tensorrt_rtx"].precisions
    assert "bfloat16" in ALL["torch"].precisions
