"""Does the graph compute what the native module computes? Fresh random inputs, several shapes, figures on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..architectures.tensors import Profile, TensorSpec
from ..backends import BuildError
from .onnx_export import sample_inputs

LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest relative error of any output tensor, per precision. Rounding explains about a tenth of each."""


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """``|value - reference| / |reference|`` in the 2-norm; infinite when a value is not finite."""
    value, reference = value.double(), reference.double()
    if not (value.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    scale = reference.norm()
    difference = (value - reference).norm()
    return float(difference / scale) if scale > 0 else float(difference)


def parity_cases(profile: Profile) -> list[dict[str, int]]:
    """A few small calls inside the profile: odd sizes, another batch, a long prompt, one hint for a whole batch."""
    small = {"B": 1, "H": 16, "W": 16, "T": 77, "HB": 1}
    odd = {"B": 2, "H": 15, "W": 19, "T": 154, "HB": 1}
    batched = {"B": 2, "H": 9, "W": 12, "T": 77, "HB": 2}
    cases = []
    for case in (small, odd, batched):
        sizes = profile.clamp(case)
        if sizes not in cases:
            cases.append(sizes)
    return cases


def check_parity(
    onnx: Path,
    reference: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    profile: Profile,
    precision: str,
    limit: float | None = None,
) -> Mapping:
    """Run the graph in ONNX Runtime on the CPU and compare every output with ``reference``.

    Args:
        reference: the function in float32, taking the same inputs in float32.
        limit: largest relative error that passes; that of the precision by default.

    Returns:
        The record for the manifest: per case its symbols and the largest relative error of its outputs.

    Raises:
        BuildError: an error is over the limit for this precision, or a value is not finite.
    """
    from ..backends.onnxruntime import OnnxRuntimeRunner

    runner = OnnxRuntimeRunner(onnx, torch.device("cpu"), 0)
    record = []
    for seed, symbols in enumerate(parity_cases(profile), start=1):
        given = sample_inputs(inputs, symbols, seed)
        results = {s.name: torch.empty(s.shape(symbols), dtype=getattr(torch, s.dtype)) for s in outputs}
        runner.run(given, results)
        with torch.inference_mode():
            expected = reference(*(t.float() for t in given.values()))
        errors = {s.name: relative_error(results[s.name], e) for s, e in zip(outputs, expected, strict=True)}
        worst = max(errors, key=errors.__getitem__)
        record.append({"symbols": symbols, "worst_output": worst, "rel_err": errors[worst]})
    limit = LIMITS[precision] if limit is None else limit
    worst_case = max(record, key=lambda case: case["rel_err"])
    if not worst_case["rel_err"] <= limit:
        raise BuildError(
            f"the exported graph differs from native by {worst_case['rel_err']:.2e} in {worst_case['worst_output']} at "
            f"{worst_case['symbols']} (limit {limit:.0e} for {precision}), so no engine was made and native keeps "
            "serving; try precision float32, and report this model if that fails too"
        )
    against = "native in float32 on the CPU"
    return {"rel_err": worst_case["rel_err"], "limit": limit, "cases": record, "against": against}
