"""The order in which a block's kernels are launched: of Inductor's, with less memory held in between.

Inductor's own reordering counts a tensor that is put together of others twice. So it prepares the frames that are kept
for a video's later convolutions first of all, and a block holds the tensors of two convolutions at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


@contextmanager
def in_little_memory() -> Iterator[None]:
    """Inside, Inductor's order of kernels is changed by ``as_needed``."""
    from torch._inductor import memory

    own = getattr(memory, "reorder_for_peak_memory", None)
    if own is None:
        log.warning("Hybrid TRT: Inductor orders kernels alone with this torch: video VAEs may take more memory")
        yield
        return
    memory.reorder_for_peak_memory = lambda *given, **named: as_needed(own(*given, **named))
    try:
        yield
    finally:
        memory.reorder_for_peak_memory = own


def as_needed(kernels: Sequence[Any]) -> list[Any]:
    """Return kernels in order, and two sorts of them in another place.

    What reads inputs of the block alone comes just before what reads it. What only the caller reads comes right behind
    all others that read the same, which may then be freed.

    Args:
        kernels: Inductor's scheduler nodes, fused.
    """
    number = {part.get_name(): at for at, kernel in enumerate(kernels) for part in kernel.get_nodes()}
    makes = {name: at for at, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}
    places = [float(at) for at in range(len(kernels))]
    reads, readers = [], []
    for at, kernel in enumerate(kernels):
        reads.append({makes[needed.name] for needed in kernel.unmet_dependencies if needed.name in makes} - {at})
        users = (user.node.get_name() for made in kernel.get_outputs() for user in made.users)
        readers.append({number[name] for name in users if name in number} - {at})
    for at in range(len(kernels)):
        if readers[at] and not reads[at]:
            places[at] = min(readers[at]) - 0.5
    for at in range(len(kernels)):
        if reads[at] and not readers[at]:
            others = {other for one in reads[at] for other in (one, *readers[one]) if other == one or readers[other]}
            places[at] = max(places[other] for other in others) + 0.25
    return [kernels[at] for at in sorted(range(len(kernels)), key=places.__getitem__)]
