"""What is made otherwise for TensorRT 8.6, as far as it can be tried without it. The rest: test_tensorrt_gpu.py."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pack  # noqa: F401
import pytest
from builds import until
from hybrid_trt.backends.tensorrt import version8
from onnx import TensorProto, helper, numpy_helper

KINDS = {"float32": (TensorProto.FLOAT, np.float32, 1e-6), "float16": (TensorProto.FLOAT16, np.float16, 2e-3)}


@pytest.mark.parametrize("dtype", KINDS)
def test_written_out_norms_compute_what_instance_normalization_does(dtype: str, tmp_path: Path) -> None:
    kind, type_, limit = KINDS[dtype]
    random = np.random.default_rng(1)
    values = {name: random.normal(1, 2, 3).astype(type_) for name in ("scale", "bias")}
    x = (100 * random.normal(3, 1, (2, 3, 4096))).astype(type_)  # squares beyond what half precision holds
    norm = helper.make_node("InstanceNormalization", ["x", "scale", "bias"], ["y"], "norm", epsilon=1e-3)
    shape = ["B", 3, "L"]
    graph = helper.make_graph(
        [norm, helper.make_node("Identity", ["y"], ["out"])], "g", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("out", kind, shape)], [numpy_helper.from_array(v, n) for n, v in values.items()])
    path = tmp_path / "model.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))

    written = version8.without_instance_norm(path, dtype)

    onnx.checker.check_model(str(written))
    assert "InstanceNormalization" not in {node.op_type for node in onnx.load(str(written)).graph.node}
    found, wide = run(written, x), x.astype(np.float64)
    scale, bias = (values[name].astype(np.float64)[:, None] for name in ("scale", "bias"))
    spread = np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    expected = (wide - wide.mean(-1, keepdims=True)) / spread * scale + bias
    assert np.abs(found - expected).max() / np.abs(expected).max() < limit


def test_the_bar_moves_while_a_build_tells_nothing_and_stops_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version8, "TICK", 0.005)
    monkeypatch.setattr(version8, "HALF_DONE", 0.05 / 60)
    told: list[tuple[str, float]] = []
    monitor = version8.Monitor(lambda *what: told.append(what))
    monitor.compiling()
    assert until(lambda: len(told) > 5 and told[-1][1] > 0.5, 30)
    assert telling()
    monitor.progress = None
    assert until(lambda: not telling(), 30)
    assert {phase for phase, _ in told} == {"compiling"}
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.5 < fractions[-1] < 1


def test_what_progress_raises_is_kept_for_the_builder_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version8, "TICK", 0.005)
    cancelled = KeyboardInterrupt("cancelled")

    def stop(*_: object) -> None:
        raise cancelled

    monitor = version8.Monitor(stop)
    monitor.compiling()
    assert until(lambda: monitor.stopped_by is cancelled and not telling(), 30)


def telling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hybrid-trt-progress"]


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].astype(np.float64)
