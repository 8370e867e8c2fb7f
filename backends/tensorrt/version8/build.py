"""Builds with TensorRT 8.6: a graph of its own, layers kept in float32, and a bar that time alone moves."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from ... import BuildRequest, Progress
from ..build import BuildSteps

HALF_DONE = 3.0
"""Minutes after which a build counts as half done: a guess, since nobody knows how much there is to do."""
TICK = 0.5
"""Seconds between two words of progress."""

KEPT_FLOAT = "/kept_float32/"
"""In the names of nodes that compute in float32, whatever the precision."""


class Version8Steps(BuildSteps):
    """Its steps of a build."""

    strongly_typed = False

    def graph(self, request: BuildRequest) -> Path:
        return own_graph(request.onnx, request.outputs[0].dtype)

    def monitor(self, trt: ModuleType, progress: Progress) -> Monitor:
        return Monitor(progress)

    def options(self, trt: ModuleType, request: BuildRequest, network: Any, monitor: Monitor) -> dict[str, Any]:
        monitor.compiling()
        return build_options(trt, network, half=any(spec.dtype == "float16" for spec in request.outputs))


class Monitor:
    """Stands where later versions have a progress monitor. 8.6 tells nothing while it compiles for minutes, so time
    alone moves the bar, ever slower; a build is stopped with its process."""

    def __init__(self, progress: Progress):
        self.progress: Progress | None = progress
        self.stopped_by: BaseException | None = None

    def compiling(self) -> None:
        """Tell of the time from now on, until ``progress`` is taken away."""
        threading.Thread(target=self._tell, args=(time.monotonic(),), name="hybrid-trt-progress", daemon=True).start()

    def _tell(self, began: float) -> None:
        while (progress := self.progress) is not None:
            minutes = (time.monotonic() - began) / 60
            try:
                progress("compiling", 1 - 0.5 ** (minutes / HALF_DONE))
            except BaseException as error:  # as a monitor would: the build is over when it comes back
                self.stopped_by = error
                return
            time.sleep(TICK)


def build_options(trt: ModuleType, network: Any, half: bool) -> dict[str, Any]:
    """Return further options of polygraphy's ``CreateConfig``; layers that ``own_graph`` named so are kept float32.

    Args:
        half: whether the graph computes in float16.
    """
    preview = trt.PreviewFeature
    options = {
        "tactic_sources": [trt.TacticSource.EDGE_MASK_CONVOLUTIONS, trt.TacticSource.JIT_CONVOLUTIONS],
        "preview_features": [  # the first two are its defaults; the third lets several contexts have one profile
            preview.FASTER_DYNAMIC_SHAPES_0805,
            preview.DISABLE_EXTERNAL_TACTIC_SOURCES_FOR_CORE_0805,
            preview.PROFILE_SHARING_0806,
        ],
    }
    if not half:
        return options
    fixed = (trt.LayerType.SHAPE, trt.LayerType.CONSTANT, trt.LayerType.CAST)
    for layer in map(network.get_layer, range(network.num_layers)):
        if KEPT_FLOAT in layer.name and layer.type not in fixed:
            layer.precision = trt.float32
    return options | {"fp16": True, "precision_constraints": "obey"}


def own_graph(path: Path, dtype: str) -> Path:
    """A graph beside ``path``, and with the same files of weights, in which InstanceNormalization is written out.

    In float32, by its definition: (x - mean) / sqrt(variance + epsilon) * scale + bias over all axes from the third on.
    Nodes that are to compute in float32 have ``KEPT_FLOAT`` in their names.

    Args:
        dtype: what the graph computes in.
    """
    import onnx

    model = onnx.load_model(str(path), load_external_data=False)
    kind = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}[dtype]
    if dtype == "float16":
        wide = _in_float(onnx.shape_inference.infer_shapes(model).graph)
        for node in model.graph.node:
            node.name += KEPT_FLOAT * wide.issuperset(node.output)
    nodes = [new for node in model.graph.node for new in (_written_out(node, kind) if _is_norm(node) else [node])]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    written = path.with_name("version8.onnx")
    written.write_bytes(model.SerializeToString())
    return written


def _in_float(graph: Any) -> set[str]:
    """The results that are computed in float32 of a float32 input, by way of nothing else."""
    from onnx import TensorProto

    values = (*graph.input, *graph.value_info, *graph.output)
    floats = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    given = {value.name for value in graph.input if value.name in floats}
    found: set[str] = set()
    for node in graph.node:  # in an order in which inputs come first
        if not (given | found).isdisjoint(node.input) and floats.issuperset(node.output):
            found.update(node.output)
    return found


def _is_norm(node: Any) -> bool:
    return node.op_type == "InstanceNormalization"


def _written_out(node: Any, kind: int) -> list[Any]:
    """The nodes in the place of an InstanceNormalization of a tensor with three axes: the exporter's GroupNorm.

    Args:
        kind: the TensorProto dtype of its input and output.
    """
    from onnx import TensorProto, helper

    (x, scale, bias), (out,), made = node.input, node.output, []
    epsilon = next((attribute.f for attribute in node.attribute if attribute.name == "epsilon"), 1e-5)

    def add(op: str, *inputs: str, gives: str = "", **attributes: Any) -> str:
        name = f"{node.name}{KEPT_FLOAT}{op}_{len(made)}"
        made.append(helper.make_node(op, inputs, [gives or name], name, **attributes))
        return gives or name

    def constant(kind: int, *values: float) -> str:
        return add("Constant", value=helper.make_tensor("value", kind, [len(values)], values))

    def as_float(name: str) -> str:
        return add("Cast", name, to=TensorProto.FLOAT)

    wide = as_float(x)
    centred = add("Sub", wide, add("ReduceMean", wide, axes=[2], keepdims=1))
    variance = add("ReduceMean", add("Mul", centred, centred), axes=[2], keepdims=1)
    normal = add("Div", centred, add("Sqrt", add("Add", variance, constant(TensorProto.FLOAT, epsilon))))
    column = constant(TensorProto.INT64, 1)
    scaled = add("Mul", normal, as_float(add("Unsqueeze", scale, column)))
    shifted = add("Add", scaled, as_float(add("Unsqueeze", bias, column)))
    add("Cast", shifted, gives=out, to=kind)
    return made
