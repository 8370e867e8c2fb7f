"""ONNX Runtime: runs the very ONNX graph that other backends compile, on the CPU, or on CUDA where its provider is."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..engine_library import Engine, Fallback, Reason, Unavailable
from ..engine_library.engine import DATA_NAME, GRAPH_NAME, PARAMETERS_NAME
from . import BuildRequest, Progress
from .file_backend import FileBackend

log = logging.getLogger(__name__)

INSTALL = "python install.py in the pack's folder, or pip install onnxruntime or onnxruntime-gpu"
OLDEST = (1, 20)
"""The first release that binds tensors by ONNX type, which float16 and bfloat16 without numpy need."""

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# onnx.TensorProto.DataType, which the bindings take in place of numpy types (numpy has no bfloat16)
_ONNX_TYPES = {torch.float32: 1, torch.float16: 10, torch.bfloat16: 16, torch.int64: 7}


class OnnxRuntimeBackend(FileBackend):
    """The embedded default: needs nothing but a pip package, and the engine is the graph itself."""

    name = "onnxruntime"
    file_names = (GRAPH_NAME, DATA_NAME, PARAMETERS_NAME)
    preference = 0
    measured_on = ("cpu",)
    builds_on_gpu = False
    refits = True
    precisions = ("float16", "float32")
    """ONNX has convolutions of brain floats from opset 22 on, and TensorRT 8.6 does not read that."""

    def version(self) -> str:
        import onnxruntime

        return onnxruntime.__version__

    def target(self, device: torch.device) -> str:
        return "any"

    def cannot_run(self, device: torch.device) -> Fallback | None:
        if (why := self.cannot_import()) is not None:
            return why
        provider = _PROVIDERS.get(device.type)
        if provider is None:
            return Fallback(Reason.BACKEND_MISSING, f"onnxruntime has no provider for {device.type} here")
        import onnxruntime

        if provider not in onnxruntime.get_available_providers():
            return Fallback(
                Reason.BACKEND_MISSING,
                f"this onnxruntime has no {provider} and the model runs on {device.type} (pip install onnxruntime-gpu)",
            )
        return None

    def cannot_import(self) -> Fallback | None:
        """The package is all that it takes, also to build, whichever distribution brings it."""
        spec = find_spec("onnxruntime")
        if spec is None or spec.origin is None:  # an uninstalled one may leave an empty folder
            return Fallback(Reason.BACKEND_MISSING, f"onnxruntime is not installed ({INSTALL})")
        try:
            version = self.version()
        except Exception as error:
            return Fallback(Reason.BACKEND_MISSING, f"onnxruntime is installed and cannot be loaded ({error})")
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
            newer = ".".join(map(str, OLDEST))
            why = f"onnxruntime {version} is too old, {newer} or newer is needed (update its package)"
            return Fallback(Reason.BACKEND_MISSING, why)
        return None

    def build(self, request: BuildRequest, progress: Progress) -> list[str]:
        """The graph is the engine: nothing to compile. One that takes any weights is the graph without them."""
        names = [request.onnx.name]
        if request.any_weights:
            return names
        return [*names, DATA_NAME] if request.onnx.with_name(DATA_NAME).exists() else names

    def load(self, engine: Engine, device: torch.device) -> OnnxRuntimeRunner:
        manifest, graph = engine.manifest, engine.read_checked(GRAPH_NAME)
        if manifest.identity.any_weights:
            return RefittableRunner(graph, device, manifest.device_bytes)
        # what was read is let go before the session makes its own of it: gigabytes are there twice, not three times
        values = _values(graph, engine.read_checked(DATA_NAME)) if DATA_NAME in manifest.files else {}
        return OnnxRuntimeRunner(graph, device, manifest.device_bytes, values)


class OnnxRuntimeRunner:
    """One inference session; tensors are bound by address, so nothing is copied on the way in or out.

    Args:
        graph: a graph's contents; or its file, beside which lie its weights.
        values: OrtValues of its weights, by initialiser; none for weights that lie in the file beside it.
        frugal: weights are used where the file is mapped; none is folded, cast or packed beforehand. Takes a fraction
            of the memory, and longer for each call.
    """

    capturable = False

    def __init__(
        self,
        graph: bytes | Path,
        device: torch.device,
        size: int,
        values: Mapping[str, Any] | None = None,
        frugal: bool = False,
    ):
        if (missing := BACKEND.cannot_build(device)) is not None:
            raise Unavailable(missing.reason, missing.detail)
        self.device = device
        self.bytes = size
        self._graph = graph
        self._open(_options(frugal), values or {})

    def _open(self, options: Any, values: Mapping[str, Any]) -> None:
        import onnxruntime

        if values:
            options.add_external_initializers(list(values), list(values.values()))
        graph, providers = self._graph, [_PROVIDERS[self.device.type]]
        graph = graph if isinstance(graph, bytes) else str(graph)
        self._session = onnxruntime.InferenceSession(graph, options, providers=providers)
        self._inputs = {i.name for i in self._session.get_inputs()}

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        binding = self._session.io_binding()
        for name, tensor in inputs.items():
            if name in self._inputs:
                binding.bind_input(name, *self._address(tensor))
        for name, tensor in outputs.items():
            binding.bind_output(name, *self._address(tensor))
        if self.device.type == "cuda":
            # the session computes on a stream of its own and waits for it before returning
            torch.cuda.current_stream(self.device).synchronize()
        self._session.run_with_iobinding(binding)

    def _address(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        element_type = _ONNX_TYPES[tensor.dtype]
        return self.device.type, self.device.index or 0, element_type, tuple(tensor.shape), tensor.data_ptr()


class RefittableRunner(OnnxRuntimeRunner):
    """A graph without weights. It runs once it was given weights, and is opened anew for new weights."""

    def _open(self, options: Any, values: Mapping[str, Any]) -> None:
        """Wait for the first weights."""
        self._session = None
        self._weights: dict[str, Any] = {}

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        self._session = None  # two at once would take twice the memory
        self._weights |= {name: _on_top_of(weights[name]) for name in changed}
        super()._open(_options(), self._weights)


def _options(frugal: bool = False) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # several sessions and torch share the cores: a pool that spins between calls slows the rest down
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if frugal:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # both keep what is done with
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED  # a weight is cast when it is wanted
    return options


def _values(graph: bytes, weights: bytes) -> dict[str, Any]:
    """Copy the weights of a graph out of the contents of their file; by initialiser."""
    import numpy
    import onnx
    import onnxruntime

    found = {}
    for tensor in onnx.load_model_from_string(graph).graph.initializer:
        where = {entry.key: entry.value for entry in tensor.external_data}
        if where:
            begin, length = int(where["offset"]), int(where["length"])
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            value = numpy.frombuffer(memoryview(weights)[begin:begin + length], dtype).reshape(tensor.dims)
            found[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy(value)
    return found


def _on_top_of(tensor: torch.Tensor) -> Any:
    """An OrtValue with a tensor's memory, which it keeps; numpy has no bfloat16."""
    import onnxruntime

    array = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.numpy(), _ONNX_TYPES[tensor.dtype])


BACKEND = OnnxRuntimeBackend()
BACKENDS = (BACKEND,)
