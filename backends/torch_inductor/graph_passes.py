"""Passes over a traced network, before Inductor has it: quantised products."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

KERNELS = "comfy_kitchen"
"""The package that has ComfyUI's kernels, and the name of its operations."""

FP8 = {5: torch.float8_e4m3fn, 6: torch.float8_e5m2}
"""That package's numbers for dtypes."""

_TENSORWISE = [0]
"""The only kind of scale, and of order in memory, that the older name has as one number for a tensor."""

def has_quantised(function: torch.nn.Module) -> bool:
    """Tell whether a network has layers with quantised weights, or ones that multiply in fp8."""
    from ...architectures.quantised_linear import multiplies_in_fp8

    return any(hasattr(layer, "quant_format") or multiplies_in_fp8(layer) for layer in function.modules())


def write_out_quantised(network: GraphModule) -> None:
    """Write quantised products out in words that Inductor can fuse with what is around them, in place.

    ComfyUI's kernels stay as they are, so that results are equal to native's, with two exceptions that are equal too:
    rounding to fp8 without a scale is one operation per element, and the product of fp8 matrices has an older name
    under which Inductor knows it.
    """
    for node in list(network.graph.nodes):
        if str(node.target) == f"{KERNELS}.quantize_fp8.default":
            _round_without_a_scale(network, node)
        elif node.target is getattr(getattr(aten, "_scaled_mm_v2", None), "default", ...):
            _multiply_by_the_older_name(network, node)
    _clamp_into_new_tensors(network)
    _share_ones(network)
    network.graph.eliminate_dead_code()
    network.recompile()


def is_write(node: Node) -> bool:
    """Tell whether an operation of a trace writes into one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _storage_of(node: Node) -> int | None:
    """Return a key of a tensor's memory, or None for what is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _clamp_into_new_tensors(network: GraphModule) -> None:
    """Have layers that multiply in fp8 clamp their input into a new tensor, where nobody else reads it later."""
    found = network.graph.find_nodes(op="call_function", target=aten.clamp.out)
    clamps = {node for node in found if node.args[0] is node.kwargs["out"]}
    place = {node: number for number, node in enumerate(network.graph.nodes)} if clamps else {}
    sharing: dict[int, list[Node]] = {}
    for node in place:
        if (storage := _storage_of(node)) is not None:
            sharing.setdefault(storage, []).append(node)
    for same in sharing.values():
        writes = [node for node in same if node in clamps]
        if not writes:
            continue
        unclamped = [node for node in same if node not in clamps]
        later = {user for node in unclamped for user in node.users if place[user] > place[writes[0]]}
        later = {user for user in later if not isinstance(user.meta.get("val"), torch.SymInt)}  # it reads a size
        only_clamped = later.issubset(same) and not any(is_write(node) for node in unclamped)
        if only_clamped and len({node.args[1:] for node in writes}) == 1:
            for node in writes:
                node.target, node.kwargs = aten.clamp.default, {}


def _share_ones(network: GraphModule) -> None:
    """Have one tensor for all scales of one: Inductor would make each of them by a kernel of its own."""
    first: dict[str, Node] = {}
    for node in network.graph.find_nodes(op="call_function", target=aten.ones.default):
        if not any(map(is_write, node.users)):
            same = first.setdefault(f"{node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)


def _round_without_a_scale(network: GraphModule, node: Node) -> None:
    given, scale, code = node.args
    if scale.target is not aten.ones.default or given.meta["val"].dtype not in (torch.bfloat16, torch.float16):
        return  # rounded twice, and a fused kernel would round once
    largest = torch.finfo(FP8[code]).max
    with network.graph.inserting_before(node):
        within = network.graph.call_function(aten.clamp.default, (given, -largest, largest))
        rounded = network.graph.call_function(aten._to_copy.default, (within,), {"dtype": FP8[code]})
    within.meta["val"], rounded.meta["val"] = given.meta["val"], node.meta["val"]
    node.replace_all_uses_with(rounded)


def _multiply_by_the_older_name(network: GraphModule, node: Node) -> None:
    one, other, scales, kind, order, its_scales, its_kind, its_order, bias, dtype, *rest = node.args
    if any(what != _TENSORWISE for what in (kind, order, its_kind, its_order)) or any(rest) or node.kwargs:
        return
    arguments = (one, other, scales[0], its_scales[0], bias, None, dtype, False)
    with network.graph.inserting_before(node):
        product = network.graph.call_function(aten._scaled_mm.default, arguments)
    product.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(product)
