"""Reading of untrusted graphs: a malformed node counts as missing, so reading never raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_execution.graph import DynamicPrompt, NodeNotFoundError

Node = Mapping[str, Any]
Prompt = Mapping[str, Any]

_MISSING: Node = {"class_type": "", "inputs": {}}


def is_node(value: object) -> bool:
    """Tell whether a value is a node of an API prompt: an object with a class and inputs."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("class_type"), str)
        and isinstance(value.get("inputs"), Mapping)
    )


def nodes_of(prompt: object) -> dict[str, Node]:
    """Return the nodes of a prompt by id, without malformed nodes."""
    found = prompt.items() if isinstance(prompt, Mapping) else ()
    return {node_id: node for node_id, node in found if isinstance(node_id, str) and is_node(node)}


def node_of(prompt: Prompt | DynamicPrompt, node_id: str) -> Node:
    """Return a node of a prompt; a missing or malformed node has no class and no inputs."""
    try:
        node = prompt.get_node(node_id) if isinstance(prompt, DynamicPrompt) else prompt[node_id]
    except (NodeNotFoundError, KeyError):
        return _MISSING
    return node if is_node(node) else _MISSING


def class_of(prompt: Prompt | DynamicPrompt, node_id: str) -> str:
    """Return the class of a node; ``""`` where there is no such node."""
    return node_of(prompt, node_id)["class_type"]


def inputs_of(prompt: Prompt | DynamicPrompt, node_id: str) -> Mapping[str, Any]:
    """Return the inputs of a node as the prompt has them; empty where there is no such node."""
    return node_of(prompt, node_id)["inputs"]
