"""Comparison of what was compiled with the same run plainly: its error, and its time."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from ...comfy_model import torch_kernels
from ...comfy_model.torch_kernels import best_attention, results_in_float32
from ...engine_library import BuildError, measurements
from ...engine_library.engine import furthest
from ...engine_library.gpu import driver_version
from ...sessions.cuda_graphs import GraphCache
from . import graph_passes
from .compiled import Compiled

log = logging.getLogger(__name__)

COMPILED_LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative error of any output against the same network run plainly, in the same precision on the same device.

In half precision it holds only where float32 cannot be had, see ``measurements``. It is below ``engine.LIMITS``: the
kernels are torch's own, fused anew.
"""


def figures(function: torch.nn.Module, compiled: Compiled, given: list) -> dict:
    """Milliseconds of a call, plain and as a prompt makes it; none where they cannot be taken: no engine needs them."""
    graphs = GraphCache(given[0].device)
    names = [str(i) for i in range(len(given))]
    try:
        def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            results = compiled(*(tensors[name] for name in names))
            return {str(i): result for i, result in enumerate(results)}

        with torch.inference_mode(), best_attention(given[0].device):
            native = torch_kernels.milliseconds(lambda: function(*given))
            engine = torch_kernels.milliseconds(lambda: graphs.run(run, dict(zip(names, given, strict=True))))
    except Exception:
        log.warning("what a call takes was not measured", exc_info=True)
        return {}
    return {"driver": driver_version(), "native_ms": round(native, 3), "engine_ms": round(engine, 3)}


def compared(
    function: torch.nn.Module, given: list, results: Sequence[torch.Tensor], names: Sequence[str], sizes: object,
    precision: str,
) -> dict[str, float]:  # fmt: skip
    """Figures of the output with the largest relative error; BuildError when it is over its limit."""
    with torch.inference_mode(), best_attention(given[0].device):
        expected = function(*given)
    native = None
    rounds = precision != "float32" or graph_passes.has_quantised(function)
    exact = results_in_float32(function, given) if rounds else None
    if exact is not None:
        native = furthest(names, expected, exact)[1]
        if math.isfinite(native):
            expected = exact
    worst, error = furthest(names, results, expected)
    found = measurements.judged(error, native, measurements.FLOORS.get(precision, COMPILED_LIMITS[precision]),
                             COMPILED_LIMITS[precision])  # fmt: skip
    if measurements.over_limit([found]):
        raise BuildError(
            f"the compiled model differs from the normal model by {error:.2e} in {worst} at {sizes} "
            f"({measurements.limit_words(found, precision)}), so no engine was made and the normal model keeps running"
        )
    return found


def against(cases: Sequence[Mapping]) -> str:
    """The reference of all cases, in words."""
    plainly, exactly = "the same weights run plainly on the same device", "the same weights in float32, beside native"
    found = {exactly if "native_rel_err" in case else plainly for case in cases}
    return found.pop() if len(found) == 1 else f"{exactly}; where that took too much memory, {plainly}"
