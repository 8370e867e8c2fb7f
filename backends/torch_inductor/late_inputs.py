"""The place in a compiled network before which it needs none of the inputs that may come late."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...sessions.cuda_capture import wait_at_point

if not hasattr(torch.ops.hybrid_trt, "arrived"):  # a module that is loaded twice finds it there
    _library = torch.library.Library("hybrid_trt", "FRAGMENT")
    _library.define("arrived(Tensor before, Tensor(a!)[] late) -> ()")

    @torch.library.impl(_library, "arrived", "CompositeExplicitAutograd")
    def _arrived(before: torch.Tensor, late: list[torch.Tensor]) -> None:
        wait_at_point()

    @torch.library.register_fake("hybrid_trt::arrived", lib=_library)
    def _fake_arrived(before: torch.Tensor, late: list[torch.Tensor]) -> None:
        pass


def wait_where_needed(graph: torch.fx.GraphModule, late: Sequence[torch.fx.Node]) -> None:
    """Have a traced network wait for late inputs, once what it computes without them is there.

    The operation says that it writes to them, though others do. That, and the tensor that the first of them meets, are
    what ties Inductor to this order: it is free in any other.
    """
    used = [node for node in late if node.users]
    users = {user for node in used for user in node.users}
    first = next((node for node in graph.graph.nodes if node in users), None)
    meets = next((node for node in first.all_input_nodes if node not in used), None) if first is not None else None
    if meets is None or meets.op == "placeholder":  # nothing to do meanwhile
        return
    with graph.graph.inserting_before(first):
        graph.graph.call_function(torch.ops.hybrid_trt.arrived.default, (meets, used))
    graph.recompile()
