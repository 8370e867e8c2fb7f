"""Measurements of engines: how far their results are from exact results, with limits and words, and their speed.

In half precision, rounding alone puts native as far from float32 as the weights happen to amplify it. So both are
compared with float32, and native's own distance is the measure. A fixed limit on the distance from native holds where
float32 cannot be computed, and for engines in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from . import trust
from .engine import Engine

TIMES_NATIVE = 1.2
"""An engine in half precision may be so many times as far from float32 as native is."""
FLOORS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""A distance that always passes: one step of the precision's last digit. Below it, chance decides who is nearer."""


def judged(error: float, native: float | None, floor: float, otherwise: float) -> dict[str, float]:
    """Return the figures of one call, as they stand among the cases of a manifest.

    Args:
        error: the engine's distance from float32, or from native where ``native`` is None.
        native: native's own distance from float32; None where nothing was compared with float32.
        floor: a distance from float32 that always passes.
        otherwise: the limit where native's distance says nothing.

    Returns:
        ``rel_err``, ``limit``, and ``native_rel_err`` where it is known.
    """
    if native is None or not math.isfinite(native):
        return {"rel_err": error, "limit": otherwise}
    return {"rel_err": error, "limit": max(floor, TIMES_NATIVE * native), "native_rel_err": native}


def over_limit(cases: Sequence[Mapping]) -> Mapping | None:
    """Return the case that is over its limit, and of several that with the largest error; None when all pass."""
    over = [case for case in cases if not case["rel_err"] <= case["limit"]]
    return max(over, key=lambda case: case["rel_err"], default=None)


def worst_case(cases: Sequence[Mapping]) -> dict[str, float]:
    """Return the figures with the largest error, which stand for all cases."""
    worst = max(cases, key=lambda case: case["rel_err"])
    return {name: worst[name] for name in ("rel_err", "native_rel_err", "limit") if name in worst}


def limit_words(case: Mapping, precision: str) -> str:
    """Say which limit a case has to keep."""
    native = case.get("native_rel_err")
    own = "" if native is None else f"; the normal model's own error is {native:.2e}"
    return f"limit {case['limit']:.0e} for {precision}{own}"


def error_words(parity: Mapping) -> str:
    """Say in one line how far an engine is from exact, from the ``parity`` of a manifest or a record."""
    error, native = parity.get("rel_err", 0.0), parity.get("native_rel_err")
    if native is None:
        return f"difference from the normal model {error:.1e}"
    return f"error {error:.1e}, the normal model's own {native:.1e}"


def figures(engine: Engine) -> Mapping:
    """Return the figures of an engine's comparison with native: measured on this GPU, else in its build."""
    record = trust.record_of(engine)
    return record.parity if record is not None and record.parity else engine.manifest.parity


def call_times(engines: Sequence[Engine]) -> tuple[float, float] | None:
    """Return the milliseconds of one call, on the first of some engines and native, as timed on a GPU here, or None."""
    found = figures(engines[0]) if engines else {}
    took, native = found.get("engine_ms"), found.get("native_ms")
    return (took, native) if took and native else None


def relative_time(engine: Engine, gpu: str) -> float | None:
    """Return the part of native's time that a call takes, as measured on this GPU: 0.5 is twice as fast.

    None without measurements. Engines are timed at their own best sizes. So only their parts of native's time can be
    compared, and not their milliseconds; a network in blocks has only this part. Native waits more for launches at
    small sizes, which flatters engines of small sizes; parts that differ by a few percent are alike.
    """
    record = trust.record_of(engine)
    if not gpu or record is None or record.gpu != gpu:
        return None
    times = call_times([engine])
    return figures(engine).get("relative_time") if times is None else times[0] / times[1]
