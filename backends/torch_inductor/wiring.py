"""Verdict on compiled blocks in their network: the first call of an engine on a machine is compared with a plain run.

A build compares each kind of block alone, without the network's weights. Whether every block has its own inputs and
weights shows in a whole call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ...architectures.user_attention import called
from ...engine_library import Engine, measurements, trust

FIGURE = "wiring"
"""Name of the error among the figures of an engine's record."""
LIMITS = {"float32": 1e-3}
HALF = 1.0
"""Limit in half precision: zeros are as far from the normal model. Rounding alone gave 0.25, see
large_models_h200.json, so blocks in each other's places may pass there."""


class Miswired(Exception):
    """Error of compiled blocks that compute something else than their network."""


def judge_of(engine: Engine) -> Callable[[float], None] | None:
    """Return what judges an engine by the error of its first call; None where an earlier call was compared."""
    if FIGURE in measurements.figures(engine):
        return None

    def judge(error: float) -> None:
        if not math.isfinite(error):  # the run is sampled again by the normal model
            return
        precision = engine.manifest.identity.precision
        # inexact attention may round otherwise where its inputs differ by a last digit
        if not error <= (HALF if called() is not None else LIMITS.get(precision, HALF)):
            raise Miswired(f"its blocks together differ from the normal model by {error:.1e}")
        if (record := trust.record_of(engine)) is not None:
            figures = {**measurements.figures(engine), FIGURE: error}
            trust.keep(engine.folder, engine.manifest, replace(record, parity=figures))

    return judge
