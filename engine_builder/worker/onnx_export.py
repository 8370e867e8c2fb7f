"""Native function -> ONNX graph on disk, checked."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...architectures.shapes import TensorSpec, sample_inputs
from ...comfy_model.snapshot import ALIGNMENT, Offsets
from ...engine_library.engine import DATA_NAME, GRAPH_NAME, write_parameters

OPSET = 17
"""The newest that TensorRT 8.6 reads."""
_lock = threading.Lock()  # torch's exporter keeps global state


def export_onnx(
    function: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    symbols: dict[str, int],
    folder: Path,
    offsets: Offsets | None = None,
    names: Mapping[torch.nn.Parameter, str] | None = None,
) -> Path:
    """Export ``function`` to ``folder/model.onnx`` with dynamic axes, its weights to ``model.onnx.data``, and check it.

    The graph never holds weights: it is traced with parameters as inputs, and these then become initialisers that
    point into the data file. Each parameter has an initialiser of its name, and ``parameters.json`` maps
    parameters to initialisers for a later refit; a parameter that the graph does not use is missing there.

    Args:
        function: takes the inputs in order, gives a tuple of the outputs in order.
        symbols: sizes of the example that is traced.
        offsets: where each parameter lies in ``model.onnx.data``, when that is written already.
        names: the parameters' names for ``parameters.json``; by default their names in ``function``.

    Raises:
        onnx.checker.ValidationError: the exporter made a graph that is not valid ONNX.
    """
    import onnx

    path = folder / GRAPH_NAME
    if offsets is None:
        offsets = write_values(function, folder / DATA_NAME)
    model = onnx.load_model_from_string(_trace(function, inputs, outputs, symbols))
    initialisers = _attach_weights(model.graph, function, {spec.name for spec in inputs}, offsets)
    names = names or {parameter: name for name, parameter in function.named_parameters()}
    write_parameters(folder, {names[parameter]: initialiser for parameter, initialiser in initialisers.items()})
    onnx.save_model(model, str(path))
    onnx.checker.check_model(str(path))
    return path


def write_values(function: torch.nn.Module, path: Path) -> Offsets:
    """Write the parameters of a module to a data file, each aligned, and return where they lie."""
    offsets = {}
    with path.open("wb") as file:
        for parameter in function.parameters():
            file.seek(-file.tell() % ALIGNMENT, 1)
            offsets[parameter] = file.tell()
            if parameter.numel():
                file.write(memoryview(parameter.detach().contiguous().flatten().view(torch.uint8).numpy()))
    return offsets


def _trace(
    function: torch.nn.Module, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], symbols: dict[str, int]
) -> bytes:
    """The serialised graph of a function, its parameters and buffers being inputs of their names."""
    graph = io.BytesIO()
    axes = {spec.name: spec.dynamic_axes() for spec in (*inputs, *outputs)}
    with contextlib.ExitStack() as stack:
        for context in (_lock, torch.inference_mode(), warnings.catch_warnings(), _quiet("torch.onnx"),
                        _fast_half_convolutions(), _shapes_without_weights()):  # fmt: skip
            stack.enter_context(context)
        warnings.simplefilter("ignore")  # tracer warnings about constants that are meant to be constant
        torch.onnx.export(
            function,
            tuple(sample_inputs(inputs, symbols, seed=0).values()),
            graph,
            export_params=False,
            keep_initializers_as_inputs=True,  # else initialisers of equal contents are merged, after reading them all
            input_names=[s.name for s in inputs],
            output_names=[s.name for s in outputs],
            dynamic_axes={name: a for name, a in axes.items() if a},
            opset_version=OPSET,
            do_constant_folding=False,  # folding renames the linear layers' weights; every backend folds by itself
            dynamo=False,
        )
    return graph.getvalue()


def _attach_weights(
    graph: Any, function: torch.nn.Module, inputs: set[str], offsets: Offsets
) -> dict[torch.nn.Parameter, str]:
    """Make initialisers of the inputs that are parameters or buffers; returns the names of the parameters'."""
    from onnx import TensorProto, numpy_helper

    parameters, buffers = dict(function.named_parameters()), dict(function.named_buffers())
    lifted = [value for value in graph.input if value.name not in inputs]
    kept = [value for value in graph.input if value.name in inputs]
    del graph.input[:]
    graph.input.extend(kept)
    initialisers = {}
    for value in lifted:
        if value.name not in parameters:  # small, and not in the file
            graph.initializer.append(numpy_helper.from_array(buffers[value.name].numpy(), value.name))
            continue
        parameter = parameters[value.name]
        tensor = graph.initializer.add(
            name=value.name, data_type=value.type.tensor_type.elem_type, data_location=TensorProto.EXTERNAL
        )
        tensor.dims.extend(parameter.shape)
        length = parameter.numel() * parameter.element_size()
        for key, entry in (("location", DATA_NAME), ("offset", offsets[parameter]), ("length", length)):
            tensor.external_data.add(key=key, value=str(entry))
        initialisers[parameter] = value.name
    return initialisers


@contextlib.contextmanager
def _fast_half_convolutions() -> Iterator[None]:
    """Compute half precision convolutions in float32 meanwhile: torch has no fast kernel for CPUs.

    This happens below the tracer, which does not see it. In a torch with other internals the export is only slower.
    """

    def convolution(x: Any, weight: Any, _kernel: Any, bias: Any, stride: Any, padding: Any) -> torch.Tensor:
        values = (x.float(), weight.float(), None if bias is None else bias.float())
        return torch.mkldnn_convolution(*values, padding, stride, [1, 1], 1).to(x.dtype)

    if not torch.backends.mkldnn.is_available():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_slow_conv2d_forward", convolution, "CPU")
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def _shapes_without_weights() -> Iterator[None]:
    """Keep the exporter's shape inference from transposing all linear weights, which says nothing about shapes.

    Else it computes and holds all values that depend only on parameters: minutes and gigabytes. The graph is the same
    to the bit.
    """
    name = "_jit_pass_onnx_graph_shape_type_inference"
    inference = getattr(torch._C, name, None)
    if inference is None:
        yield
        return
    setattr(torch._C, name, lambda graph, _parameters, opset: inference(graph, {}, opset))
    try:
        yield
    finally:
        setattr(torch._C, name, inference)


class _quiet:
    """Keep the exporter's own messages about its age out of the user's log."""

    def __init__(self, logger: str):
        self._logger = logging.getLogger(logger)

    def __enter__(self) -> None:
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
