"""Nodes of saved workflows as data: their sockets, rules for wires between these, and their boxes in the drawing.

An *Anything Everywhere* node (cg-use-everywhere) feeds inputs by titles, names, groups and colours. Versions before 7
keep its expressions as widgets, later versions keep all filters as a property.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Data = dict[str, Any]
Node = dict[str, Any]

INPUT_NODE, OUTPUT_NODE = -10, -20
"""Ids that stand for the inputs and outputs of a subgraph, in the links inside it."""
TITLE = 30.0
"""Height of a node's title, which is above its position."""
COLLAPSED = 120.0
"""About how wide a collapsed node is: its title decides."""
REGEXES = ("title_regex", "input_regex", "group_regex")
_ALL = ("", ".*", None)


def kind_of(socket: Data) -> Any:
    """Return the type of an input or output; without a type it is any."""
    return socket.get("type") or "*"


def free(node: Node, kind: Any) -> list[int]:
    """Return the inputs of a type that nothing is wired to."""
    inputs = enumerate(node.get("inputs") or [])
    return [slot for slot, socket in inputs if kind_of(socket) == kind and socket.get("link") is None]


def fits(one: Any, other: Any) -> bool:
    """Tell whether LiteGraph lets two types be connected."""
    if one in ("", "*", 0, None) or other in ("", "*", 0, None):
        return True
    return not set(str(one).lower().split(",")).isdisjoint(str(other).lower().split(","))


def bypass_slot(node: Node, output: int, kind: Any) -> int | None:
    """Return the input that a bypassed node passes on: beside the output if it fits, else the first that fits."""
    inputs = node.get("inputs") or []
    outputs = (node.get("outputs") or [])[output:output + 1]
    made = kind_of(outputs[0]) if outputs else "*"
    if kind in ("*", ""):
        return (output if output < len(inputs) else 0) if inputs else None
    if output < len(inputs) and fits(kind_of(inputs[output]), made) and fits(kind_of(inputs[output]), kind):
        return output
    exact = (slot for slot, socket in enumerate(inputs) if kind_of(socket) == kind)
    near = (slot for slot, socket in enumerate(inputs) if fits(kind_of(socket), made) and fits(kind_of(socket), kind))
    return next(exact, next(near, None))


def is_in(node: Node, box: Sequence[float]) -> bool:
    """Tell whether a group's box has a node, as the page counts it."""
    return touch(box, middle(node))


def drawn_box(node: Node) -> list[float]:
    """Return a node's box with its title; a collapsed node has only the title, and a reroute is a point."""
    width, height = node.get("size") or (0.0, -TITLE)
    if (node.get("flags") or {}).get("collapsed"):
        width, height = min(width, COLLAPSED), 0.0
    return [node["pos"][0], node["pos"][1] - (TITLE if "size" in node else 0), width, height + TITLE]


def middle(node: Node) -> list[float]:
    """Return the middle of a node's box, as a box without a size."""
    x, y, width, height = drawn_box(node)
    return [x + width / 2, y + height / 2, 0.0, 0.0]


def touch(one: Sequence[float], other: Sequence[float]) -> bool:
    """Tell whether two boxes (x, y, width, height) touch."""
    return all(one[i] <= other[i] + other[i + 2] and other[i] <= one[i] + one[i + 2] for i in (0, 1))


def is_understood(sender: Node) -> bool:
    """Tell whether the filters of a node that sends everywhere can be followed here."""
    filters = _filters(sender)
    kinds = [socket.get("type") for socket in sender.get("inputs") or [] if socket.get("link") is not None]
    try:
        for name in REGEXES:
            re.compile(filters.get(name) or "")
    except (re.error, TypeError):
        return False
    only_highways = str(filters.get("input_regex") or "").startswith("+")
    return not only_highways and len(set(kinds)) == len(kinds)  # two inputs of a type are matched by input names


def feeds(sender: Node, node: Node, socket: Data, groups: Sequence[Data]) -> bool:
    """Tell whether the understood filters of a node that sends everywhere let it feed a free input.

    Args:
        groups: the graph's groups.
    """
    filters = _filters(sender)

    def lets(name: str, text: Any) -> bool:
        """Tell whether a filter lets a text pass."""
        wanted = filters.get(name)
        return wanted in _ALL or bool(re.search(wanted, str(text))) != bool(filters.get(f"{name}_invert"))

    def restricts(name: str, alike: bool) -> bool:
        """Tell whether a filter keeps out a node that is, or is not, like the sender."""
        return {1: not alike, 2: alike}.get(filters.get(name), False)

    title = node.get("title") or (node.get("properties") or {}).get("Node name for S&R") or node["type"]
    label = socket.get("label") or socket.get("localized_name") or socket.get("name")
    holding = [group for group in groups if is_in(node, group["bounding"])]
    if restricts("group_restricted", any(is_in(sender, group["bounding"]) for group in holding)):
        return False
    if restricts("color_restricted", sender.get("color") == node.get("color")):
        return False
    grouped = filters.get("group_regex") in _ALL or any(lets("group_regex", group.get("title")) for group in holding)
    return grouped and lets("title_regex", title) and lets("input_regex", label)


def priority(sender: Node) -> float:
    """Return the rank of a node that sends everywhere: the highest rank feeds an input that several nodes may feed."""
    filters = _filters(sender)
    given = filters.get("priority")
    if isinstance(given, int | float) and given:
        return given
    return (20 * any(filters.get(name) not in _ALL for name in REGEXES)
            + 3 * bool(filters.get("group_restricted")) + 6 * bool(filters.get("color_restricted"))) + 10


def _filters(sender: Node) -> Mapping[str, Any]:
    properties = sender.get("properties") or {}
    found, values = properties.get("ue_properties"), sender.get("widgets_values")
    if isinstance(found, Mapping):
        return found
    return {**properties, **(dict(zip(REGEXES, values, strict=False)) if isinstance(values, list) else {})}
