"""A bfloat16 graph as one that computes in float32: ONNX Runtime has no convolutions of brain floats on a CPU.

What is compared then is the graph with its rounded weights; how a backend rounds in between shows on its own device.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

NARROW = "/bfloat16"
"""Ends the names of weights that are cast."""


def in_float32_graph(path: Path) -> Path:
    """A graph beside ``path``, and with the same file of weights, whose brain floats are float32."""
    model = onnx.load_model(str(path), load_external_data=False)
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        _widen(node)
    casts = []
    for weights in graph.initializer:
        if weights.data_type == TensorProto.BFLOAT16:
            casts.append(helper.make_node("Cast", [weights.name + NARROW], [weights.name], to=TensorProto.FLOAT))
            weights.name += NARROW
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    written = path.with_name("float32.onnx")
    onnx.save_model(model, str(written))
    return written


def _widen(node: onnx.NodeProto) -> None:
    """Constants and casts of a node in float32."""
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
            attribute.i = TensorProto.FLOAT
        if attribute.HasField("t") and attribute.t.data_type == TensorProto.BFLOAT16:
            values = numpy_helper.to_array(attribute.t).astype(numpy.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(values, attribute.t.name))
