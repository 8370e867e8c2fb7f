"""Inductor's choices for sums over rows and lines. Importing Inductor takes seconds: import this where it is used."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch._inductor.config
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

AT_ONCE = 4096
"""Elements of the longest rows that a program keeps in registers while it sums them up; Inductor's is 1024."""


MANY_SUMS = 8192
"""From so many sums on there are programs enough for a GPU when each goes through its lines step by step."""
LINE = 16
"""Elements of the shortest line that is worth steps."""
HEAD = 256
"""Elements of the longest row that is kept in registers whatever else the program does with it."""


class Rows(InductorChoices):
    """Choices for sums over rows and lines.

    Layer norms read each of their rows once, where Inductor reads rows of more than 1024 elements twice. So do norms
    of an attention's heads, which turn what they have normed: Inductor takes that for no sum over rows. Lines of an
    image (see ``inductor_tuning``) are added up by few threads each. Inductor gives short ones as many threads as
    they have elements, which then have to put their one element each together.
    """

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        known, hint = V.graph.sizevars, features.get_reduction_hint()
        if _of_rows(features) and known.statically_known_leq(features.reduction_numel, HEAD):
            return True
        if hint == ReductionHint.DEFAULT and _only_sums(features):
            many = known.statically_known_leq(MANY_SUMS, features.numel)
            if many and known.statically_known_leq(LINE, features.reduction_numel):
                return False
        usual = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
        return usual or (
            hint == ReductionHint.INNER and known.statically_known_leq(features.reduction_numel, AT_ONCE)
        )

    def uuid(self) -> str:
        """Return a key of these choices. Newer torches write no file of a network without it."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _of_rows(features: Any) -> bool:
    """Tell whether all sums are over neighbours in memory, whatever else the program reads or writes."""
    read = [dep for node in features.reduction_nodes() for dep in node.read_writes.reads]
    return all(isinstance(dep, MemoryDep) and dep.stride1_for_last_dim() for dep in read)


def _only_sums(features: Any) -> bool:
    return all(node.node.get_reduction_type() == "sum" for node in features.reduction_nodes())


@contextlib.contextmanager
def our_rows() -> Iterator[None]:
    """Inside, Inductor decides as ``Rows``."""
    # the handler first: what stands in its place is made, and kept, by the setting, which only tells caches apart here
    with V.set_choices_handler(Rows()), torch._inductor.config.patch(inductor_choices_class=Rows):
        yield
