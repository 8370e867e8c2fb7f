"""What an engine node stands for, found in a prompt without running it: a key over the node and all that it depends on.

Two nodes with the same key want the same engine: a copy, the node in another tab, in a subgraph, after a reload. Node
ids and titles are no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .workflow_graph import is_link

ENGINE_NODES = ("TRTUNetEngine", "TRTControlNetEngine")

_IGNORED = ("when_missing", "opt_size")
"""What to do about a missing engine says nothing about which one it is; one that is best at another size serves."""
MAX_DEPTH = 200
MAX_NESTING = 50


class BadPrompt(ValueError):
    """A prompt of which no key can be made; the text is for the user."""


def node_key(prompt: Mapping[str, Any], node_id: str) -> str:
    """The key of a node of an API prompt.

    Raises:
        BadPrompt: the node or one that it depends on is missing, malformed or part of a loop.
    """
    return _key(prompt, node_id, {}, ())


def _key(prompt: Mapping[str, Any], node_id: str, known: dict[str, str], path: tuple[str, ...]) -> str:
    if node_id in known:
        return known[node_id]
    node = prompt.get(node_id)
    if not isinstance(node, Mapping) or not isinstance(node.get("inputs"), Mapping):
        raise BadPrompt(f"the prompt has no node {node_id!r} with inputs")
    if node_id in path or len(path) > MAX_DEPTH:
        raise BadPrompt(f"the prompt has a loop or is too deep at node {node_id!r}")
    inputs = {}
    for name, value in node["inputs"].items():
        if name not in _IGNORED:
            inputs[name] = (
                [_key(prompt, value[0], known, (*path, node_id)), value[1]] if is_link(value) else _plain(value)
            )
    text = json.dumps([str(node.get("class_type")), inputs], sort_keys=True, default=str)
    known[node_id] = hashlib.sha256(text.encode()).hexdigest()[:24]
    return known[node_id]


def _plain(value: Any, depth: int = MAX_NESTING) -> Any:
    """ComfyUI turns 1 into 1.0 where a node wants a float, so both have to count as one."""
    if isinstance(value, int) and abs(value) >= 1 << 1023:
        raise BadPrompt("the prompt has a number that no node can use")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    if isinstance(value, dict | list) and depth == 0:
        raise BadPrompt("the prompt has a value that is nested too deeply")
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item, depth - 1) for name, item in value.items()}
    return value
