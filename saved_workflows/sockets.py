"""Inputs and outputs of nodes in saved workflows: their types, and rules for wires between them."""

from __future__ import annotations

from typing import Any

Data = dict[str, Any]
Node = dict[str, Any]

INPUT_NODE, OUTPUT_NODE = -10, -20
"""Ids that stand for the inputs and outputs of a subgraph, in the links inside it."""


def kind_of(socket: Data) -> Any:
    """Return the type of an input or output; without a type it is any."""
    return socket.get("type") or "*"


def free(node: Node, kind: Any) -> list[int]:
    """Return the inputs of a type that nothing is wired to."""
    inputs = enumerate(node.get("inputs") or [])
    return [slot for slot, one in inputs if kind_of(one) == kind and one.get("link") is None]


def fits(one: Any, other: Any) -> bool:
    """Return whether LiteGraph lets two types be connected."""
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
