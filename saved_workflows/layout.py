"""Room for a node in a drawn graph: nodes right of its place move right, and groups grow.

A group keeps its nodes: the page counts a node if its middle is in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .sockets import INPUT_NODE, Data, Node

if TYPE_CHECKING:
    from .graph import Graph

GAP = 50.0
TITLE = 30.0
"""Height of a node's title, which is above its position."""
COLLAPSED = 120.0
"""About how wide a collapsed node is: its title decides."""


def place(graph: Graph, behind: Any, node: Node) -> None:
    """Give a new node a place right of the node that it follows, or of the subgraph's inputs."""
    left, y, width, _ = _box(graph, behind)
    start = left + width
    height = node["size"][1]
    in_row = [one for one in graph.nodes.values()
              if one["pos"][1] - TITLE < y + height + GAP / 2
              and one["pos"][1] + one["size"][1] > y - TITLE - GAP / 2]  # fmt: skip
    x = max([start, *(one["pos"][0] + one["size"][0] for one in in_row if not _moves(one, start))]) + GAP
    end = x + node["size"][0]
    _make_room(graph, start, end + GAP - min([start, *(one["pos"][0] for one in in_row if _moves(one, start))]))
    node["pos"] = [x, y]
    for group in graph.data.get("groups") or []:
        gx, gy, gw, gh = group["bounding"]
        if gx <= left and start <= gx + gw and gy <= y <= gy + gh:
            wide = max(gw, end + GAP / 2 - gx)
            grown = ([gx, gy, wide, high] for high in (max(gh, y + height + GAP / 2 - gy), gh))
            group["bounding"] = next((box for box in grown if not _takes_in(graph, group, box)), group["bounding"])


def _takes_in(graph: Graph, group: Data, grown: list[float]) -> bool:
    """Tell whether a grown group newly touches a node or a group, or newly has the middle of a node."""
    others = [one["bounding"] for one in graph.data["groups"] if one is not group]
    nodes = [box for node in graph.nodes.values() for box in (_drawn(node), _middle(node))]
    return any(_touch(grown, one) and not _touch(group["bounding"], one) for one in (*others, *nodes))


def is_in(node: Node, box: Sequence[float]) -> bool:
    """Tell whether a group's box has a node, as the page counts it."""
    return _touch(box, _middle(node))


def _drawn(one: Node) -> list[float]:
    """Return a node's box with its title; a collapsed node has only the title, and a reroute is a point."""
    width, height = one.get("size") or (0.0, -TITLE)
    if (one.get("flags") or {}).get("collapsed"):
        width, height = min(width, COLLAPSED), 0.0
    return [one["pos"][0], one["pos"][1] - (TITLE if "size" in one else 0), width, height + TITLE]


def _middle(one: Node) -> list[float]:
    x, y, width, height = _drawn(one)
    return [x + width / 2, y + height / 2, 0.0, 0.0]


def _touch(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(one[i] <= other[i] + other[i + 2] and other[i] <= one[i] + one[i + 2] for i in (0, 1))


def _moves(one: Node, start: float) -> bool:
    """Tell whether the middle of a node, or a reroute, is right of a line: it moves like groups that hold it."""
    return _middle(one)[0] >= start - 1


def _box(graph: Graph, node: Any) -> list[float]:
    if node == INPUT_NODE:
        return list(graph.data["inputNode"]["bounding"])
    return [*graph.nodes[node]["pos"], *graph.nodes[node]["size"]]


def _make_room(graph: Graph, start: float, width: float) -> None:
    """Move nodes right whose middle is right of a line; groups across the line grow if they hold such nodes."""
    moving = [one for one in (*graph.nodes.values(), *_reroutes(graph.data)) if _moves(one, start)]
    for group in graph.data.get("groups") or []:
        box = group["bounding"]
        if box[0] >= start - 1:
            box[0] += width
        elif any(_touch(box, _middle(one)) for one in moving):
            box[2] += width
    for one in moving:
        one["pos"] = [one["pos"][0] + width, one["pos"][1]]
    for side in ("inputNode", "outputNode"):
        box = graph.data[side]["bounding"] if graph.inside else [start - 2]
        box[0] += width if box[0] >= start - 1 else 0


def _reroutes(data: Data) -> list[Data]:
    return [*(data.get("reroutes") or []), *((data.get("extra") or {}).get("reroutes") or [])]
