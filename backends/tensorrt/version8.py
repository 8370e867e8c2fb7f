"""TensorRT 8.6, where it differs from 10, 11 and RTX. It is the last version for Pascal and Volta cards.

* Networks are weakly typed: ``float16`` allows half precision, and TensorRT picks per layer. Two things are kept in
  float32 by name: GroupNorm, since its sums would overflow, and what the graph itself computes in float32 of an input,
  which is the sines of the timestep. At t = 900 an angle in half precision is up to 0.25 off, and that alone costs up
  to 4e-2 of a result (at t = 50 up to 3e-3). Before, engines were 7e-3 to
  2.7e-2 from native on an H200, by what TensorRT had picked.
* InstanceNormalization is a plugin that needs cuDNN 8, which torch no longer brings: it is written out instead. For
  the same reason no tactic of cuBLAS or cuDNN is tried.
* Its layer for norms is no way out: an engine for batch 1 to 2 took 36 ms with it and 14 with ours, at twice the error.
  Nor is its plugin GroupNorm: on an H200 two calls were not the same to the bit, so a seed would not give the same
  picture again, and its norms took 0.18 ms of a call's 3.7. With sums of each channel no build had ended in 8 minutes.
* An engine is for one size. For batch 1 to 2 one could not be recorded as a CUDA graph, and a call took 14.1 ms; for
  batch 2 alone 3.7 in another run (a ControlNet of SD1.5 at 512 on H200s: benchmarks/results/tensorrt86_h200.json).
* It takes other weights at about 0.2 GB a second, with 16 threads no faster than with one: a LoRA on a UNet of 5 GB
  takes 20 s. Its bindings keep Python's lock meanwhile, so ComfyUI's server does not answer.
* There is neither a progress monitor nor bfloat16, contexts take their scratch memory in an older way, and weights
  are given as numpy's arrays.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import Progress

PRECISIONS = ("float16", "float32")

BUILD_STACK = 512 << 20
"""Bytes of stack: with the usual 8 MB a build of SD1.5's UNet with replaceable weights was ended by SIGSEGV, with these
it was not (one build each, on H200s)."""

HALF_DONE = 3.0
"""Minutes after which a build counts as half done: a guess, since nobody knows how much there is to do."""
TICK = 0.5
"""Seconds between two words of progress."""

KEPT_FLOAT = "/kept_float32/"
"""In the names of nodes that compute in float32, whatever the precision."""


def build_memory(weights: int) -> int:
    """Main memory of a build, in bytes, read off builds of 0.7, 1.7 and 5.1 GB of weights."""
    return int(max(5.9e9 + 3.4 * weights, 9 * weights - 4.3e9))


def is_version8(trt: ModuleType) -> bool:
    """Tell whether a package is TensorRT 8; RTX counts from 1."""
    return trt.__name__ == "tensorrt" and trt.__version__.startswith("8.")


def weights(trt: ModuleType, tensor: torch.Tensor) -> Any:
    """A tensor on the CPU as weights for a refit; its values are read where they are."""
    return trt.Weights(tensor.numpy())


def scratch_bytes(engine: Any) -> int:
    """Return what any call of an engine needs beside the weights."""
    return engine.device_memory_size


def context(engine: Any) -> _Context | None:
    """An execution context without scratch memory of its own; None when there is no room for it."""
    made = engine.create_execution_context_without_device_memory()
    if made is None:
        return None
    if made.active_optimization_profile < 0:  # only an engine's first context has one by itself
        stream = torch.cuda.current_stream()
        made.set_optimization_profile_async(0, stream.cuda_stream)
        stream.synchronize()
    return _Context(made, engine.device_memory_size)


class _Context:
    """An execution context that takes scratch memory as those of later versions do."""

    def __init__(self, context: Any, scratch_bytes: int):
        self._context, self._bytes = context, scratch_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def update_device_memory_size_for_shapes(self) -> int:
        """Bytes that the next call needs: always those of the largest one."""
        return self._bytes

    def set_device_memory(self, pointer: int, _size: int) -> None:
        self._context.device_memory = pointer


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
