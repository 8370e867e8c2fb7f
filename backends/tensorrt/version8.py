"""What TensorRT 8.6 does otherwise than 10, 11 and RTX: all in this file. It is the last for Pascal and Volta cards.

* Networks are weakly typed: ``float16`` allows half precision, and TensorRT picks per layer. GroupNorm is kept in
  float32 by name, since its sums would overflow.
* InstanceNormalization is a plugin that needs cuDNN 8, which torch no longer brings: it is written out instead. For
  the same reason no tactic of cuBLAS or cuDNN is tried.
* Its layer for norms is no way out: an engine for batch 1 to 2 took 36 ms with it and 14 with ours, at twice the error.
  Nor is its plugin GroupNorm: on an H200 two calls were not the same to the bit, so a seed would not give the same
  picture again, and its norms took 0.18 ms of a call's 3.7. With sums of each channel no build had ended in 8 minutes.
* An engine is for one size. For batch 1 to 2 one could not be recorded as a CUDA graph, and a call took 14.1 ms; for
  batch 2 alone 3.7 in another run (a ControlNet of SD1.5 at 512 on H200s: benchmarks/results/tensorrt86_h200.json).
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

BUILD_MEMORY = 3.4
"""Main memory of a build, in sizes of the weights."""
BUILD_BASE = 5_300_000_000
"""Bytes that it takes besides: its builder is a gigabyte of kernels."""

HALF_DONE = 3.0
"""Minutes after which a build counts as half done: a guess, since nobody knows how much there is to do."""
TICK = 0.5
"""Seconds between two words of progress."""

KEPT_FLOAT = "/kept_float32/"
"""In the names of nodes that compute in float32, whatever the precision."""


def is_version8(trt: ModuleType) -> bool:
    """Whether a package is TensorRT 8; RTX counts from 1."""
    return trt.__name__ == "tensorrt" and trt.__version__.startswith("8.")


def weights(trt: ModuleType, tensor: torch.Tensor) -> Any:
    """A tensor on the CPU as weights for a refit; its values are read where they are."""
    return trt.Weights(tensor.numpy())


def scratch_bytes(engine: Any) -> int:
    """What any call of an engine needs beside the weights."""
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
    """What polygraphy's ``CreateConfig`` needs to be told besides; the layers of written-out norms are kept float32.

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


def without_instance_norm(path: Path, dtype: str) -> Path:
    """A graph beside ``path``, and with the same files of weights, in which InstanceNormalization is written out.

    In float32, by its definition: (x - mean) / sqrt(variance + epsilon) * scale + bias over all axes from the third on.

    Args:
        dtype: what the graph computes in.
    """
    import onnx

    model = onnx.load_model(str(path), load_external_data=False)
    kind = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}[dtype]
    nodes = [new for node in model.graph.node for new in (_written_out(node, kind) if _is_norm(node) else [node])]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    written = path.with_name("version8.onnx")
    written.write_bytes(model.SerializeToString())
    return written


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
