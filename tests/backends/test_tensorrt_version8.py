"""TensorRT 8.6's differences, as far as they can be tried without it. The rest: test_tensorrt_gpu.py."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
import slow
import torch
from builds import until
from fake_engine import publish_engine
from hybrid_trt.backends import backends
from hybrid_trt.backends.tensorrt import runner
from hybrid_trt.backends.tensorrt.version8 import build as version8
from hybrid_trt.backends.tensorrt.version8.backend import BACKEND
from hybrid_trt.engine_builder.build import build_engine, run_here
from hybrid_trt.engine_builder.order import BuildOrder
from hybrid_trt.engine_library import Library
from onnx import TensorProto, helper, numpy_helper
from profiles import profile_of
from small_networks import network

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

    written = version8.own_graph(path, dtype)

    onnx.checker.check_model(str(written))
    assert "InstanceNormalization" not in {node.op_type for node in onnx.load(str(written)).graph.node}
    found, wide = run(written, x), x.astype(np.float64)
    scale, bias = (values[name].astype(np.float64)[:, None] for name in ("scale", "bias"))
    spread = np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    expected = (wide - wide.mean(-1, keepdims=True)) / spread * scale + bias
    assert np.abs(found - expected).max() / np.abs(expected).max() < limit


@pytest.mark.parametrize("kind", slow.cases({"unet": "unet", "controlnet": "controlnet"}, ["unet"]))
def test_the_timesteps_sines_are_kept_in_float32_and_nothing_of_attention(kind: str, tmp_path: Path) -> None:
    """At t = 900 an angle in half precision is off by up to 0.25."""
    net = network(kind, "sd15_as_published", torch.float16)
    order = BuildOrder(net, "float16", profile_of(64, 96, 320), backends()["onnxruntime"])
    engine = build_engine(order, Library([tmp_path]), lambda *_: None, run=run_here)
    (exported,) = engine.folder.glob("*.onnx")
    before, after = exported.read_bytes(), version8.own_graph(exported, "float16")
    assert exported.read_bytes() == before
    nodes = onnx.load(str(after), load_external_data=False).graph.node
    norms = [node for node in nodes if "/" + version8.KEPT_FLOAT.strip("/") + "/" in node.name and
             not node.name.endswith(version8.KEPT_FLOAT)]  # fmt: skip
    kept = [node for node in nodes if node.name.endswith(version8.KEPT_FLOAT)]
    assert norms, "GroupNorm, written out"
    assert {node.op_type for node in kept} == {"Unsqueeze", "Cast", "Mul", "Cos", "Sin", "Concat"}
    assert len(kept) == 6
    assert "timesteps" in kept[0].input
    exact = onnx.load(str(version8.own_graph(exported, "float32")), load_external_data=False)
    assert not [node for node in exact.graph.node if node.name.endswith(version8.KEPT_FLOAT)]


def test_its_contexts_take_scratch_memory_as_those_of_later_versions_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, trt = Mock(device_memory_size=1000), Mock()
    monkeypatch.setattr(runner, "shared_logger", lambda _trt: SimpleNamespace(listeners={}))
    monkeypatch.setattr(runner, "deserialise", lambda *_: native)
    monkeypatch.setattr(runner, "_check_tensors", lambda *_: frozenset("x"))
    native.create_execution_context_without_device_memory.return_value = made = Mock(active_optimization_profile=0)
    opened = BACKEND.opened_engine(trt, "TensorRT", publish_engine(tmp_path), torch.device("cpu"))
    assert (opened.scratch_bytes, opened.jit_cache) == (1000, None)
    context = opened.new_context()
    assert context.update_device_memory_size_for_shapes() == 1000
    context.set_device_memory(4096, 1000)
    assert made.device_memory == 4096
    assert context.execute_async_v3 is made.execute_async_v3
    native.create_execution_context_without_device_memory.return_value = None
    assert opened.new_context() is None


class Layer:
    """Stands for a layer of TensorRT's network."""

    def __init__(self, name: str, kind: str):
        self.name, self.type, self.precision = name, kind, "any"


def test_layers_that_are_kept_compute_in_float32_and_the_others_as_is_fastest() -> None:
    kinds = SimpleNamespace(SHAPE="shape", CONSTANT="constant", CAST="cast")
    trt = SimpleNamespace(float32="float32", LayerType=kinds, PreviewFeature=Mock(), TacticSource=Mock())
    layers = [Layer("a/kept_float32/", "unary"), Layer("a/kept_float32/Cast_1", "cast"), Layer("b", "unary")]
    built = SimpleNamespace(num_layers=3, get_layer=layers.__getitem__)
    options = version8.build_options(trt, built, half=True)
    assert [layer.precision for layer in layers] == ["float32", "any", "any"]
    assert (options["fp16"], options["precision_constraints"]) == (True, "obey")


def test_the_bar_moves_while_a_build_tells_nothing_and_stops_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version8, "TICK", 0.005)
    monkeypatch.setattr(version8, "HALF_DONE", 0.05 / 60)
    told: list[tuple[str, float]] = []
    monitor = version8.Monitor(lambda *what: told.append(what))
    monitor.compiling()
    assert until(lambda: len(told) > 5 and told[-1][1] > 0.5, 60)
    assert telling()
    monitor.progress = None
    assert until(lambda: not telling(), 60)
    assert {phase for phase, _ in told} == {"compiling"}
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.5 < fractions[-1] < 1

    cancelled = KeyboardInterrupt("cancelled")

    def stop(*_: object) -> None:
        raise cancelled

    monitor = version8.Monitor(stop)
    monitor.compiling()
    assert until(lambda: monitor.stopped_by is cancelled and not telling(), 60), "kept for the builder to raise"


def telling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hybrid-trt-progress"]


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].astype(np.float64)
