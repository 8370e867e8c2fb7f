"""The node that ComfyUI runs at present, for threads that it has not told: those that a node starts by itself."""

from __future__ import annotations

from comfy_execution.utils import ExecutionContext

from ..comfy_model.comfyui_internals import Feature, works


def running_node(known: ExecutionContext | None) -> ExecutionContext | None:
    """The execution of the node that runs, the latest of several; None where none does.

    Args:
        known: an execution that is given again while its node runs. Executions are told apart by their objects.
    """
    if not works(Feature.QUEUE):
        return None
    from comfy_execution import progress

    registry = progress.global_progress_registry
    if registry is None:
        return None
    nodes = registry.nodes.copy()  # the thread that runs the nodes adds some
    running = [name for name, node in nodes.items() if name and node["state"] is progress.NodeState.Running]
    # known first: what samples in such a thread reports its progress under the id that the page shows
    if known is not None and known.prompt_id == registry.prompt_id and known.node_id in running:
        return known
    return ExecutionContext(registry.prompt_id, running[-1], None) if running else None
