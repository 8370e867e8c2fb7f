"""What Inductor decides otherwise than it does by itself. Imported when something is compiled: it imports Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch._inductor.config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

AT_ONCE = 2048
"""Elements of the longest rows that a program keeps in registers while it sums them up; Inductor's is 1024."""


class LongRows(InductorChoices):
    """Layer norms read each of their rows once, where Inductor reads those of more than 1024 elements twice."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        usual = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
        is_row = features.get_reduction_hint() == ReductionHint.INNER
        return usual or (is_row and V.graph.sizevars.statically_known_leq(features.reduction_numel, AT_ONCE))


@contextlib.contextmanager
def long_rows() -> Iterator[None]:
    """Inside, Inductor decides as ``LongRows``."""
    # the handler first: what stands in its place is made, and kept, by the setting, which only tells caches apart here
    with V.set_choices_handler(LongRows()), torch._inductor.config.patch(inductor_choices_class=LongRows):
        yield
