"""How far an engine's numbers may be from native's: the figure that manifests keep, and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
