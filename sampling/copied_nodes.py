"""The tallies of nodes that ComfyUI copied while a prompt ran, one for each iteration of a loop, as of one node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .call_stats import CallStats
from .timing import TimesTogether


def as_drawn(rows: Iterable[CallStats], drawn: Callable[[str], str]) -> list[CallStats]:
    """One stats for each network and each sampling node of the user's graph, in the order in which they were opened.

    Args:
        drawn: id of a node -> id of the node in the user's graph that it stands for.
    """
    found: dict[tuple[str, ...], list[CallStats]] = {}
    for row in rows:
        found.setdefault((row.kind, row.name, drawn(row.engine_node), drawn(row.sampler_node)), []).append(row)
    return [_together(key, own) for key, own in found.items()]


def _together(key: tuple[str, ...], rows: Sequence[CallStats]) -> CallStats:
    if len(rows) == 1 and (rows[0].engine_node, rows[0].sampler_node) == key[2:]:
        return rows[0]
    total = CallStats(*key, node_key=rows[0].node_key, opened=rows[0].opened)
    for row in rows:
        total.backend = row.backend or total.backend
        total.engine_name = row.engine_name or total.engine_name
        total.remark = row.remark or total.remark
        total.engine += row.engine
        total.native += row.native
        total.beside += row.beside
        total.late += row.late
        total.apart += row.apart
        total.reopened += row.reopened
        total.plain += row.plain
        total.why_plain = total.why_plain or row.why_plain
        total.calls += row.calls
        total.details = {**row.details, **total.details}
        total.advices = {**row.advices, **total.advices}
        for counts, more in ((total.reasons, row.reasons), (total.uncovered, row.uncovered)):  # fmt: skip
            for what, count in more.items():
                counts[what] = counts.get(what, 0) + count
        for symbol, size in row.beyond.items():
            total.beyond[symbol] = max(size, total.beyond.get(symbol, 0))
    if all(row.times is not None for row in rows):
        total.times = TimesTogether([row.times for row in rows])
    return total
