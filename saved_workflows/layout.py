"""Room for a node in a drawn graph: nodes right of its place move right, and groups grow.

A group keeps its nodes: the page counts a node if its middle is in the group.
"""

from __future__ import annotations

from typing import Any

from .graph import Graph
from .node_data import INPUT_NODE, TITLE, Data, Node, drawn_box, middle, touch

GAP = 50.0


def place(graph: Graph, behind: Any, node: Node) -> None:
    """Give a new node a place right of the node that it follows, or of the subgraph's inputs."""
    left, y, width, _ = _box(graph, behind)
    start = left + width
    height = node["size"][1]
    in_row = [other for other in graph.nodes.values()
              if other["pos"][1] - TITLE < y + height + GAP / 2
              and other["pos"][1] + other["size"][1] > y - TITLE - GAP / 2]  # fmt: skip
    x = max([start, *(other["pos"][0] + other["size"][0] for other in in_row if not _moves(other, start))]) + GAP
    end = x + node["size"][0]
    next_left = min([start, *(other["pos"][0] for other in in_row if _moves(other, start))])
    _make_room(graph, start, end + GAP - next_left)
    node["pos"] = [x, y]
    for group in graph.data.get("groups") or []:
        gx, gy, gw, gh = group["bounding"]
        if gx <= left and start <= gx + gw and gy <= y <= gy + gh:
            wide = max(gw, end + GAP / 2 - gx)
            grown = ([gx, gy, wide, high] for high in (max(gh, y + height + GAP / 2 - gy), gh))
            group["bounding"] = next((box for box in grown if not _takes_in(graph, group, box)), group["bounding"])


def _takes_in(graph: Graph, group: Data, grown: list[float]) -> bool:
    """Tell whether a grown group newly touches a node or a group, or newly has the middle of a node."""
    boxes = [other["bounding"] for other in graph.data["groups"] if other is not group]
    boxes += [box for node in graph.nodes.values() for box in (drawn_box(node), middle(node))]
    return any(touch(grown, box) and not touch(group["bounding"], box) for box in boxes)


def _moves(node: Node, start: float) -> bool:
    """Tell whether the middle of a node, or a reroute, is right of a line: it moves like groups that hold it."""
    return middle(node)[0] >= start - 1


def _box(graph: Graph, node: Any) -> list[float]:
    if node == INPUT_NODE:
        return list(graph.data["inputNode"]["bounding"])
    return [*graph.nodes[node]["pos"], *graph.nodes[node]["size"]]


def _make_room(graph: Graph, start: float, width: float) -> None:
    """Move nodes right whose middle is right of a line; groups across the line grow if they hold such nodes."""
    drawn = (*graph.nodes.values(), *_reroutes(graph.data))
    moving = [node for node in drawn if _moves(node, start)]
    for group in graph.data.get("groups") or []:
        box = group["bounding"]
        if box[0] >= start - 1:
            box[0] += width
        elif any(touch(box, middle(node)) for node in moving):
            box[2] += width
    for node in moving:
        node["pos"] = [node["pos"][0] + width, node["pos"][1]]
    for side in ("inputNode", "outputNode"):
        box = graph.data[side]["bounding"] if graph.inside else [start - 2]
        box[0] += width if box[0] >= start - 1 else 0


def _reroutes(data: Data) -> list[Data]:
    return [*(data.get("reroutes") or []), *((data.get("extra") or {}).get("reroutes") or [])]
