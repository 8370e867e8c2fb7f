"""Compares drawn workflows natively and through engines, and judges by how far native is from itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy
from comfy_process import ComfyProcess, PromptRejected
from scenarios import Prompt, node, relative_difference

LIMIT = 2e-5
ASTRAY = 20
"""An engine may be so many times as far from native as native is from itself after a nudge."""
AMPLIFIES = {"ModelMergeAdd": 1e-3, "ModelComputeDtype": 1e-2}
"""Limits where rounding leads further astray than a nudge shows: weights added to weights, half precision."""

PromptOf = Callable[[Any, bool, str], Prompt]
"""Makes a prompt of a workflow, whether through engines, and a name for its latent."""


def latent(comfy: ComfyProcess, prompt_of: PromptOf, workflow: Any, engines: bool) -> tuple[numpy.ndarray | str, list]:
    """The latent, or what failed; and the report's rows."""
    history = comfy.queue(prompt_of(workflow, engines, "engines" if engines else "native"), timeout=300)
    if not history.ok:
        return str(history.error), []
    rows = history.output("report", "report")[0]["rows"] if engines else []
    return numpy.load(history.output("save", "latent")[0]), rows


@dataclass
class Seen:
    """Count of what was compared, and of the calls of networks that it took."""

    workflows: int = 0
    interrupted: int = 0
    on_engines: int = 0
    native: int = 0
    families: Counter[str] = field(default_factory=Counter)

    def add(self, family: str, rows: list[dict]) -> None:
        self.workflows += 1
        self.families[family] += 1
        self.on_engines += sum(row["engine"] for row in rows)
        self.native += sum(row["native"] for row in rows)


def interrupt(comfy: ComfyProcess, built: Prompt, random: Random, seen: Seen) -> str | None:
    """Run a prompt that is interrupted at any of the first thousand operations of its samplings; tell what failed."""
    first = next(one for one in built.values() if "latent_image" in one["inputs"])
    operation = int(10 ** random.uniform(0, 3))
    built["interrupted"] = node("TestInterruptedAt", samples=first["inputs"]["latent_image"], operation=operation)
    first["inputs"]["latent_image"] = ["interrupted", 0]
    history = comfy.queue(built, timeout=300)
    seen.interrupted += history.status == "interrupted"
    return None if history.status == "interrupted" or history.ok else f"interrupted at {operation}: {history.error}"


def wrong(
    native: ComfyProcess, engines: ComfyProcess, workflow: Any, prompt_of: PromptOf, seen: Seen, limit: float = LIMIT,
    interrupts: Random | None = None,
) -> str | None:
    """Return what differs more than rounding explains; None too where ComfyUI cannot do it or gives no numbers.

    Args:
        interrupts: draws where the same prompt is interrupted before; without it none is.
    """
    try:
        reference, _ = latent(native, prompt_of, workflow, False)
    except PromptRejected:
        return None
    if interrupts is not None and not isinstance(reference, str):
        failed = interrupt(engines, prompt_of(workflow, True, "interrupted"), interrupts, seen)
        if failed is not None:
            return failed
    found, rows = latent(engines, prompt_of, workflow, True)
    if interrupts is not None and not any(row["engine"] for row in rows):
        # ComfyUI's own patches keep what an interrupt left in them, and the next prompt begins with it
        reference, _ = latent(engines, prompt_of, workflow, False)
    if isinstance(reference, str) or isinstance(found, str):
        same = isinstance(reference, str) and isinstance(found, str)
        return None if same else f"natively {reference!s:.200}, with engines {found!s:.200}"
    if not numpy.isfinite(reference).all() or not reference.any():
        return None
    seen.add(workflow.family, rows)
    if any(row["native"] and not row["reasons"] for row in rows):
        return f"native ran without a reason: {rows}"
    error = relative_difference(found, reference)
    classes = {name for name, *_ in (*workflow.before, *workflow.after)}
    if error <= max([limit, *(AMPLIFIES[name] for name in classes & AMPLIFIES.keys())]):
        return None
    nudged, _ = latent(native, prompt_of, workflow.nudged(), False)
    astray = 0.0 if isinstance(nudged, str) else ASTRAY * relative_difference(nudged, reference)
    return None if error <= astray else f"{error:.1e} from native"
