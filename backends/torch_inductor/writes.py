"""Additions in place, ``x += y``, taken out of a traced network: what writes in place cannot be cut into parts.

Torch's own way, ``functionalize``, would take sizes for granted that are to stay free.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def take_out_writes(network: GraphModule) -> None:
    """Let a traced network add into new tensors, where it adds in place and writes nowhere else.

    Raises:
        ValueError: it writes in another way, or into what is read through another tensor later.
    """
    place = {node: number for number, node in enumerate(network.graph.nodes)}
    for node in list(network.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        if node.target is not aten.add_.Tensor or not _may_be_new(node, place):
            raise ValueError(f"{node.target} writes in place")
        with network.graph.inserting_before(node):
            new = network.graph.call_function(aten.add.Tensor, node.args, node.kwargs)
        new.meta, place[new] = dict(node.meta), place[node]
        written = node.args[0]
        for user in [user for user in written.users if place[user] > place[node]]:
            user.replace_input_with(written, new)
        node.replace_all_uses_with(new)
        network.graph.erase_node(node)
    network.recompile()


def _may_be_new(node: Node, place: dict[Node, int]) -> bool:
    """Tell whether a new tensor would do: of the same type, and what is written is read in no other way later."""
    written, added = node.args[:2]
    value = written.meta["val"]
    if written.op == "placeholder" or isinstance(added, Node) and not _keeps_type(value, added.meta["val"]):
        return False
    earlier = (other for other in place if place[other] < place[node] and other is not written)
    return not any(
        place[user] > place[node]
        for other in earlier
        if _storage(other) == _storage(written)
        for user in other.users
    )


def _keeps_type(value: torch.Tensor, added: object) -> bool:
    return not isinstance(added, torch.Tensor) or torch.result_type(value, added) == value.dtype


def _storage(node: Node) -> int | None:
    """Return what tells a tensor's memory from that of others, or None for what is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
