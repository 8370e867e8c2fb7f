"""Filters of *Anything Everywhere* nodes (cg-use-everywhere): they feed inputs by titles, names, groups and colours.

Versions before 7 keep their expressions as widgets, later versions keep all filters as a property.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .layout import is_in
from .sockets import Data, Node

REGEXES = ("title_regex", "input_regex", "group_regex")
_ALL = ("", ".*", None)


def is_understood(sender: Node) -> bool:
    """Tell whether the filters of a node that sends everywhere can be followed here."""
    filters = _filters(sender)
    kinds = [one.get("type") for one in sender.get("inputs") or [] if one.get("link") is not None]
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

    def fits(name: str, text: Any) -> bool:
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
    grouped = filters.get("group_regex") in _ALL or any(fits("group_regex", group.get("title")) for group in holding)
    return grouped and fits("title_regex", title) and fits("input_regex", label)


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
