"""Room for a node that is put into a drawn graph: what stands right of its place moves right, and groups grow."""

from __future__ import annotations

from typing import Any

from .graph import INPUT_NODE, Data, Graph, Node

GAP = 50.0
TITLE = 30.0
"""Height of a node's title, which stands above its position."""


def place(graph: Graph, behind: Any, node: Node) -> None:
    """Give a new node a place right of the node that it follows, or of the subgraph's inputs."""
    left, y, width, _ = _box(graph, behind)
    start = left + width
    height = node["size"][1]
    in_row = [one for one in graph.nodes.values()
              if one["pos"][0] < start and one["pos"][1] - TITLE < y + height + GAP / 2
              and one["pos"][1] + one["size"][1] > y - TITLE - GAP / 2]  # fmt: skip
    x = max([start, *(one["pos"][0] + one["size"][0] for one in in_row)]) + GAP
    end = x + node["size"][0]
    _make_room(graph, start, end + GAP - start)
    node["pos"] = [x, y]
    for group in graph.data.get("groups") or []:
        gx, gy, gw, gh = group["bounding"]
        if gx <= left and start <= gx + gw and gy <= y <= gy + gh:
            group["bounding"] = [gx, gy, max(gw, end + GAP / 2 - gx), max(gh, y + height + GAP / 2 - gy)]


def _box(graph: Graph, node: Any) -> list[float]:
    if node == INPUT_NODE:
        return list(graph.data["inputNode"]["bounding"])
    return [*graph.nodes[node]["pos"], *graph.nodes[node]["size"]]


def _make_room(graph: Graph, start: float, width: float) -> None:
    """Move right what begins right of a line; groups across it grow."""
    for one in (*graph.nodes.values(), *_reroutes(graph.data)):
        if one["pos"][0] >= start - 1:
            one["pos"] = [one["pos"][0] + width, one["pos"][1]]
    for group in graph.data.get("groups") or []:
        box = group["bounding"]
        box[0 if box[0] >= start - 1 else 2] += width if box[0] + box[2] > start else 0
    for side in ("inputNode", "outputNode"):
        box = graph.data[side]["bounding"] if graph.inside else [start - 2]
        box[0] += width if box[0] >= start - 1 else 0


def _reroutes(data: Data) -> list[Data]:
    return [*(data.get("reroutes") or []), *((data.get("extra") or {}).get("reroutes") or [])]
