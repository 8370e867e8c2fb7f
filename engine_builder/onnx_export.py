"""Native function -> ONNX graph on disk, checked."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ..architectures.tensors import TensorSpec

GRAPH_NAME = "model.onnx"
PARAMETERS_NAME = "parameters.json"
OPSET = 18
MAX_INLINE_BYTES = 1_900_000_000
"""Weights above this go to a file beside the graph: protobuf ends at 2 GB."""

_lock = threading.Lock()  # torch's exporter keeps global state


def sample_inputs(specs: Sequence[TensorSpec], symbols: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of the sizes that sampling has: standard normal, timesteps 0 to 999, hints 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for spec in specs:
        shape = spec.shape(symbols)
        if spec.name == "timesteps":
            values = torch.rand(shape, generator=generator) * 999
        elif spec.name == "hint":
            values = torch.rand(shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator)
        inputs[spec.name] = values.to(getattr(torch, spec.dtype))
    return inputs


def export_onnx(
    function: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    symbols: dict[str, int],
    folder: Path,
    max_inline_bytes: int = MAX_INLINE_BYTES,
) -> Path:
    """Export ``function`` to ``folder/model.onnx`` with dynamic axes, and check the graph.

    Parameters keep their names as initialisers, and ``parameters.json`` tells which initialiser holds which one, so
    that a later refit finds them all. Weights over ``max_inline_bytes`` go to ``model.onnx.data``.

    Args:
        function: takes the inputs in order, gives a tuple of the outputs in order.
        symbols: sizes of the example that is traced.

    Raises:
        onnx.checker.ValidationError: the exporter made a graph that is not valid ONNX.
    """
    import onnx

    path = folder / GRAPH_NAME
    traced = folder / "traced"
    traced.mkdir()
    axes = {spec.name: spec.dynamic_axes() for spec in (*inputs, *outputs)}
    with _lock, torch.inference_mode(), warnings.catch_warnings(), _quiet("torch.onnx"):
        warnings.simplefilter("ignore")  # tracer warnings about constants that are meant to be constant
        torch.onnx.export(
            function,
            tuple(sample_inputs(inputs, symbols, seed=0).values()),
            str(traced / GRAPH_NAME),
            input_names=[s.name for s in inputs],
            output_names=[s.name for s in outputs],
            dynamic_axes={name: a for name, a in axes.items() if a},
            opset_version=OPSET,
            do_constant_folding=False,  # folding renames the linear layers' weights; every backend folds by itself
            dynamo=False,
        )
    model = onnx.load(str(traced / GRAPH_NAME))
    external = model.ByteSize() > max_inline_bytes
    _write_parameters(model, function, folder)
    onnx.save_model(
        model,
        str(path),
        save_as_external_data=external,
        all_tensors_to_one_file=True,
        location=path.name + ".data",
        size_threshold=1024,
    )
    for file in traced.iterdir():
        file.unlink()
    traced.rmdir()
    onnx.checker.check_model(str(path))
    return path


def _write_parameters(model, function: torch.nn.Module, folder: Path) -> None:
    """Write parameter name -> initialiser name.

    Torch merges initialisers of equal contents (zero biases), so several parameters may name one initialiser. One that
    is missing here is baked into a constant.
    """
    initialisers = {i.name: tuple(i.dims) for i in model.graph.initializer}
    by_value: dict[bytes, str] = {}
    mapping = {}
    for name, parameter in function.named_parameters():
        values = parameter.detach().contiguous()
        content = values.flatten().view(torch.uint8).numpy().tobytes()
        if name in initialisers and initialisers[name] == tuple(parameter.shape):
            by_value.setdefault(content, name)
            mapping[name] = name
        elif content in by_value:
            mapping[name] = by_value[content]
    (folder / PARAMETERS_NAME).write_text(json.dumps(mapping, indent=0), encoding="utf-8")


class _quiet:
    """Keep the exporter's own messages about its age out of the user's log."""

    def __init__(self, logger: str):
        self._logger = logging.getLogger(logger)

    def __enter__(self) -> None:
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
