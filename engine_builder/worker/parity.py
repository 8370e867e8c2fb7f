"""Does the graph compute what the native module computes? Fresh random inputs, several shapes, figures on record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from ...architectures.shapes import TensorSpec, sample_inputs
from ...engine_library import BuildError
from ...engine_library.engine import LIMITS, relative_error
from ...sessions.session import Runner

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


@dataclass(frozen=True)
class Case:
    """One call and what native gives for it.

    Attributes:
        symbols: its sizes.
        given: inputs by name, in the engine's dtypes, on the CPU.
        expected: native's outputs in order, computed in float32.
    """

    symbols: dict[str, int]
    given: dict[str, torch.Tensor]
    expected: tuple[torch.Tensor, ...]


def reference_cases(
    function: torch.nn.Module, inputs: Sequence[TensorSpec], calls: Iterable[dict[str, int]]
) -> list[Case]:
    """Calls of some sizes, with native's outputs in float32, whatever dtype its weights are in.

    Weights are cast layer by layer, so this takes no memory beside them. Nothing of the function is needed afterwards:
    drop it before an engine is opened.
    """
    cases = []
    with torch.inference_mode(), in_float32(function):
        for seed, symbols in enumerate(calls, start=1):
            given = sample_inputs(inputs, symbols, seed)
            cases.append(Case(symbols, given, tuple(function(*(t.float() for t in given.values())))))
    return cases


def compare(runner: Runner, cases: Iterable[Case], outputs: Sequence[TensorSpec]) -> list[dict]:
    """Run an engine on each case: its symbols, and the output with the largest relative error."""
    record = []
    for case in cases:
        given = {name: tensor.to(runner.device) for name, tensor in case.given.items()}
        results = {
            s.name: torch.empty(s.shape(case.symbols), dtype=getattr(torch, s.dtype), device=runner.device)
            for s in outputs
        }
        runner.run(given, results)
        pairs = zip(outputs, case.expected, strict=True)
        errors = {s.name: relative_error(results[s.name].cpu(), expected) for s, expected in pairs}
        worst = max(errors, key=errors.__getitem__)
        record.append({"symbols": case.symbols, "worst_output": worst, "rel_err": errors[worst]})
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
        limit: largest relative error that passes; that of the precision by default.

    Returns:
        The record for the manifest: per case its symbols and the largest relative error of its outputs.

    Raises:
        BuildError: an error is over the limit for this precision, or a value is not finite.
    """
    from ...backends.onnxruntime import OnnxRuntimeRunner

    if precision == "bfloat16":

        onnx, outputs = in_float32_graph(onnx), [replace(spec, dtype="float32") for spec in outputs]
        cases = [replace(case, given={name: t.float() for name, t in case.given.items()}) for case in cases]
    record = compare(OnnxRuntimeRunner(onnx, torch.device("cpu"), 0, frugal=True), cases, outputs)
    limit = LIMITS[precision] if limit is None else limit
    worst_case = max(record, key=lambda case: case["rel_err"])
    if not worst_case["rel_err"] <= limit:
        raise BuildError(
            f"the exported graph differs from the normal model by {worst_case['rel_err']:.2e} in "
            f"{worst_case['worst_output']} at {worst_case['symbols']} (limit {limit:.0e} for {precision}), so no "
            "engine was made and the normal model keeps running; try precision float32, and report this model if that "
            "fails too"
        )
    against = "native in float32 on the CPU"
    return {"rel_err": worst_case["rel_err"], "limit": limit, "cases": record, "against": against}


@contextlib.contextmanager
def in_float32(function: torch.nn.Module) -> Iterator[None]:
    """Let a module compute in float32: each layer's weights are cast while it runs, and dropped again.

    A layer whose weights another one reads past its forward is not seen, and torch refuses to mix the dtypes.
    """

    def cast(layer: torch.nn.Module, _args: tuple) -> None:
        own[layer] = dict(layer._parameters)
        for name, parameter in own[layer].items():
            if parameter is not None:
                layer._parameters[name] = torch.nn.Parameter(parameter.float(), requires_grad=False)

    def drop(layer: torch.nn.Module, _args: tuple, _result: object) -> None:
        layer._parameters.update(own.pop(layer))

    own: dict[torch.nn.Module, dict] = {}
    hooks, dtypes = [], {}
    for layer in function.modules():
        if any(p is not None and p.dtype != torch.float32 for p in layer._parameters.values()):
            hooks += [layer.register_forward_pre_hook(cast), layer.register_forward_hook(drop)]
        if isinstance(getattr(layer, "dtype", None), torch.dtype):  # ComfyUI's networks cast to it inside
            dtypes[layer], layer.dtype = layer.dtype, torch.float32
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, parameters in own.items():  # those that failed
            layer._parameters.update(parameters)
        for layer, dtype in dtypes.items():
            layer.dtype = dtype
