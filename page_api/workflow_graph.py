"""Reading the prompt's graph: which nodes lie upstream, and what the user's files are called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from comfy_execution.graph import DynamicPrompt, NodeNotFoundError

MODEL_NAME_INPUTS = ("unet_name", "ckpt_name", "control_net_name", "model_name")


def upstream(prompt: DynamicPrompt, node_id: str, first_inputs: tuple[str, ...] | None = None) -> Iterator[str]:
    """Ids of the nodes that a node depends on, the nearest first, itself not included.

    Args:
        first_inputs: follow only these inputs of the node itself; of the others all.
    """
    seen, queue = {node_id}, [(node_id, first_inputs)]
    while queue:
        current, allowed = queue.pop(0)
        for name, value in inputs_of(prompt, current).items():
            if (allowed is None or name in allowed) and is_link(value) and value[0] not in seen:
                seen.add(value[0])
                queue.append((value[0], None))
                yield value[0]


def drawn_id(prompt: DynamicPrompt, node_id: str) -> str:
    """The node of the user's graph that a node stands for: one that another node made is a copy of it, or part of it.

    Loops make copies of the nodes inside for each iteration.
    """
    shown = prompt.get_display_node_id(node_id)
    return shown if shown in prompt.get_original_prompt() else prompt.get_real_node_id(node_id)


def drawn_upstream(prompt: DynamicPrompt, node_id: str) -> Iterator[str]:
    """Ids of the nodes that a node depends on in the user's graph.

    ComfyUI takes the links into a loop from the node that ends it, once the loop runs.
    """
    return upstream(DynamicPrompt(prompt.get_original_prompt()), drawn_id(prompt, node_id))


def all_nodes(prompt: DynamicPrompt) -> dict[str, Any]:
    """The user's graph with the nodes that others have made so far, as an API prompt."""
    own = prompt.get_original_prompt()
    return {node_id: prompt.get_node(node_id) for node_id in (*own, *sorted(prompt.all_node_ids() - own.keys()))}


def model_name(prompt: DynamicPrompt, node_id: str, input_name: str, default: str) -> str:
    """The file that a loader upstream of an input was told to load, or ``default``."""
    for node in upstream(prompt, node_id, (input_name,)):
        inputs = inputs_of(prompt, node)
        for name in MODEL_NAME_INPUTS:
            if isinstance(inputs.get(name), str):
                return inputs[name]
    return default


def whole_prompt(prompt: DynamicPrompt, node_id: str) -> dict[str, Any]:
    """A node and all that it depends on, as an API prompt."""
    found = {}
    for current in (node_id, *upstream(prompt, node_id)):
        with contextlib.suppress(NodeNotFoundError):
            found[current] = prompt.get_node(current)
    return found


def inputs_of(prompt: DynamicPrompt, node_id: str) -> dict[str, Any]:
    """The inputs of a node as the prompt has them; empty when there is no such node."""
    try:
        return prompt.get_node(node_id)["inputs"]
    except NodeNotFoundError:
        return {}


def is_link(value: Any) -> bool:
    """Whether an input of a prompt is another node's output: [node id, output index]."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
