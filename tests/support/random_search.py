"""Compares drawn workflows natively and through engines, and judges by how far native is from itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
from comfy_process import ComfyProcess, PromptRejected
from scenarios import Prompt, relative_difference

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
    on_engines: int = 0
    native: int = 0
    families: Counter[str] = field(default_factory=Counter)

    def add(self, family: str, rows: list[dict]) -> None:
        self.workflows += 1
        self.families[family] += 1
        self.on_engines += sum(row["engine"] for row in rows)
        self.native += sum(row["native"] for row in rows)


def wrong(
    native: ComfyProcess, engines: ComfyProcess, workflow: Any, prompt_of: PromptOf, seen: Seen, limit: float = LIMIT
) -> str | None:
    """Return what differs more than rounding explains; None too where ComfyUI cannot do it or gives no numbers."""
    try:
        reference, _ = latent(native, prompt_of, workflow, False)
    except PromptRejected:
        return None
    found, rows = latent(engines, prompt_of, workflow, True)
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
