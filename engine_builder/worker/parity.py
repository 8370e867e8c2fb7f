"""Comparison of a graph with the native module: fresh random inputs, several shapes, figures on record."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from ...architectures.shapes import TensorSpec, sample_inputs
from ...comfy_model.torch_kernels import best_attention, results_in_float32, without_tf32
from ...engine_library import BuildError, measurements
from ...engine_library.engine import LIMITS, furthest
from ...sessions.session import Runner

log = logging.getLogger(__name__)

NARROW = "/bfloat16"
"""End of the names of weights that are cast."""


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


@dataclass(frozen=True)
class Case:
    """One call and native's results for it.

    Attributes:
        symbols: its sizes.
        given: inputs by name, in the engine's dtypes, on the CPU.
        expected: native's outputs in order, on the CPU; computed in float32 where that could be had.
        native: native's distance from them in half precision; None where that is not known.
    """

    symbols: dict[str, int]
    given: dict[str, torch.Tensor]
    expected: tuple[torch.Tensor, ...]
    native: float | None = None


def reference_cases(
    function: torch.nn.Module, inputs: Sequence[TensorSpec], calls: Iterable[dict[str, int]]
) -> list[Case]:
    """Calls of some sizes, with native's outputs in float32, whatever dtype its weights are in.

    Weights are cast layer by layer, so this takes no memory beside them. Nothing of the function is needed afterwards:
    drop it before an engine is opened. Native's own error is from the first call: half precision is slow on a CPU.
    """
    cases, cpu = [], torch.device("cpu")
    for seed, symbols in enumerate(calls, start=1):
        case = native_case(function, symbols, sample_inputs(inputs, symbols, seed), cpu, own=not cases)
        cases.append(case if not cases else replace(case, native=cases[0].native))
    return cases


def native_case(
    function: torch.nn.Module, symbols: dict[str, int], given: dict[str, torch.Tensor], device: torch.device,
    own: bool = True,
) -> Case:  # fmt: skip
    """A call on a device with native's results, in float32 where that can be had.

    Args:
        own: whether to measure native's distance from float32 in half precision.
    """
    tensors = [tensor.to(device) for tensor in given.values()]
    exact, error = results_in_float32(function, tensors), None
    with torch.inference_mode(), best_attention(device), without_tf32():
        if exact is None:
            exact = function(*tensors)
        elif own and any(tensor.dtype != torch.float32 for tensor in tensors):
            error = _own_error(function, tensors, exact)
    return Case(symbols, given, tuple(result.float().cpu() for result in exact), error)


def _own_error(
    function: torch.nn.Module, tensors: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> float | None:
    """Native's distance from float32 in half precision; None where torch cannot compute that on this device."""
    try:
        return furthest([str(i) for i in range(len(exact))], function(*tensors), exact)[1]
    except RuntimeError as error:
        log.warning("Hybrid TRT: native's own error was not measured (%s)", error)
        return None


def compare(
    runner: Runner, cases: Iterable[Case], outputs: Sequence[TensorSpec], floor: float, limit: float
) -> list[dict]:
    """Run an engine on each case: its symbols, the output with the largest relative error, and its figures.

    Args:
        floor, limit: see ``measurements.judged``.
    """
    record = []
    for case in cases:
        given = {name: tensor.to(runner.device) for name, tensor in case.given.items()}
        results = {
            s.name: torch.empty(s.shape(case.symbols), dtype=getattr(torch, s.dtype), device=runner.device)
            for s in outputs
        }
        runner.run(given, results)
        worst, error = furthest(list(results), list(results.values()), case.expected)
        found = measurements.judged(error, case.native, floor, limit)
        record.append({"symbols": case.symbols, "worst_output": worst, **found})
    return record


def check_parity(
    onnx: Path,
    cases: Sequence[Case],
    outputs: Sequence[TensorSpec],
    precision: str,
    limit: float | None = None,
) -> Mapping:
    """Run the graph in ONNX Runtime on the CPU and compare every output with native's; of brain floats in float32.

    Args:
        cases: from ``reference_cases``.
        limit: largest relative error that passes where native's own is not known; by default the precision's.

    Returns:
        The record for the manifest: per case its symbols and the largest relative error of its outputs.

    Raises:
        BuildError: an error is over the limit for this precision, or a value is not finite.
    """
    from ...backends.onnxruntime import OnnxRuntimeRunner

    if precision == "bfloat16":

        onnx, outputs = in_float32_graph(onnx), [replace(spec, dtype="float32") for spec in outputs]
        cases = [replace(case, given={name: t.float() for name, t in case.given.items()}) for case in cases]
    runner = OnnxRuntimeRunner(onnx, torch.device("cpu"), 0, frugal=True)
    limit = LIMITS[precision] if limit is None else limit
    record = compare(runner, cases, outputs, measurements.FLOORS.get(precision, 0.0), limit)
    if over := measurements.over_limit(record):
        raise BuildError(
            f"the exported graph differs from the normal model by {over['rel_err']:.2e} in {over['worst_output']} at "
            f"{over['symbols']} ({measurements.limit_words(over, precision)}), so no engine was made and the normal "
            "model keeps running; try precision float32, and report this model if that fails too"
        )
    return {**measurements.worst_case(record), "cases": record, "against": "native in float32 on the CPU"}
