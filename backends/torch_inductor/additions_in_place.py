"""Takes additions in place, ``x += y``, out of a traced network, which could not be cut into parts with them.

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
    writes = [node for node in place if is_write(node)]
    sharing: dict[int, list[Node]] = {}
    for node in place if writes else ():
        if (storage := storage_of(node)) is not None:
            sharing.setdefault(storage, []).append(node)
    for node in writes:
        others = sharing[storage_of(node)]
        if not _is_addition(node) or _is_read_elsewhere(node, others, place):
            raise ValueError(f"{node.target} writes in place")
        new = _into_a_new_tensor(node, place)
        place[new] = place[node]
        others.append(new)
    network.recompile()


def is_write(node: Node) -> bool:
    """Tell whether an operation of a trace writes into one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def storage_of(node: Node) -> int | None:
    """Return what tells a tensor's memory from that of others, or None for what is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _is_addition(node: Node) -> bool:
    """Tell whether a write adds to a tensor that the network has made, and the sum would be of its type."""
    if node.target is not aten.add_.Tensor or node.args[0].op == "placeholder":
        return False
    written, added = (given.meta["val"] if isinstance(given, Node) else given for given in node.args[:2])
    return torch.result_type(written, added) == written.dtype


def _is_read_elsewhere(node: Node, others: list[Node], place: dict[Node, int]) -> bool:
    """Tell whether what is written is read later through another tensor.

    Args:
        others: the tensors that share its memory; only those that were there before the write count.
    """
    earlier = [other for other in others if place[other] < place[node] and other is not node.args[0]]
    return any(place[user] > place[node] for other in earlier for user in other.users)


def _into_a_new_tensor(node: Node, place: dict[Node, int]) -> Node:
    """Put an addition in the place of one in place, and of what it writes to wherever that is read later."""
    written = node.args[0]
    with node.graph.inserting_before(node):
        new = node.graph.call_function(aten.add.Tensor, node.args, node.kwargs)
    new.meta = dict(node.meta)
    for user in [user for user in written.users if place.get(user, -1) > place[node]]:
        user.replace_input_with(written, new)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new
