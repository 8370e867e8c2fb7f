"""Forecast for an engine node before it runs: why there is no engine yet, and how long one takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import folder_paths
import torch
from comfy_execution.graph import DynamicPrompt

from ..architectures import Role
from ..architectures.shapes import SIZE_NAMES, Picture, RequestedSizes
from ..backends.lookup import usable_backends
from ..engine_builder.expected_time import expected
from ..engine_library import Library, Unavailable
from .workflow_graph import inputs_of, model_name, upstream

MODEL_INPUTS = {"TRTUNetEngine": "model", "TRTControlNetEngine": "control_net"}
"""Engine node -> its model input."""
KINDS = {"TRTUNetEngine": Role.BACKBONE.value, "TRTControlNetEngine": Role.CONTROLNET.value}


@dataclass(frozen=True)
class NodeRequest:
    """Request of an engine node of a prompt, as far as the prompt alone tells.

    Attributes:
        kind: ``"unet"`` or ``"controlnet"``.
        label: the model's file, or ``""``.
        lora: whether a LoRA before the node makes its engine another one.
        backend: the node's choice.
        sizes: the node's numbers; None where the prompt does not tell them.
        pictures: those that the graph asks for.
        of_all_uses: those of all uses of the node, where it stands in a subgraph that is used several times.
        samplers: the samplers of all its uses.
    """

    kind: str
    label: str
    lora: bool
    backend: str
    sizes: RequestedSizes | None = None
    pictures: tuple[Picture, ...] = ()
    of_all_uses: tuple[Picture, ...] = ()
    samplers: tuple[str, ...] = ()


def wish_of(prompt: Mapping[str, Any], node_id: str) -> NodeRequest:
    """Return what a node of an API prompt asks for. The prompt has been checked: its nodes have a key."""
    graph = DynamicPrompt(dict(prompt))
    kind = str(prompt[node_id]["class_type"])
    name = MODEL_INPUTS[kind]
    above = [inputs_of(graph, node) for node in upstream(graph, node_id, (name,))]
    inputs = inputs_of(graph, node_id)
    lora = any("lora" in str(key).lower() for inputs in above for key in inputs)
    lora = lora and inputs.get("weights") != "replaceable"
    backend = inputs.get("backend")
    backend = backend if isinstance(backend, str) else ""
    numbers = {size: inputs.get(size, 0) for size in SIZE_NAMES}
    sizes = RequestedSizes(**numbers) if all(isinstance(n, int) for n in numbers.values()) else None
    return NodeRequest(KINDS[kind], model_name(graph, node_id, name, ""), lora, backend, sizes)


def parameters_of(wish: NodeRequest, like: int, like_bytes: int) -> int:
    """Roughly how many parameters a model has of which only the file is known, by the size of another one's file.

    0 when there is no such file.

    Args:
        like, like_bytes: that model's parameters and the size of its file.
    """
    for folder in ("checkpoints", "diffusion_models") if wish.kind == Role.BACKBONE else ("controlnet",):
        with contextlib.suppress(OSError, ValueError):  # Windows refuses some names
            path = folder_paths.get_full_path(folder, wish.label) if wish.label else None
            if path is not None and like_bytes:
                return round(like * os.path.getsize(path) / like_bytes)
    return 0


def seconds(
    library: Library, backend: str, device: str, kind: str, precision: str, parameters: int
) -> tuple[float | None, bool]:
    """Return the seconds that an engine takes to build here, None when not known, and whether the torch backend
    serves without one, so that nothing has to be built at all."""
    try:
        usable = usable_backends(backend, torch.device(device))
        chosen = usable[0]
        known = expected(library, kind, chosen.name, precision, chosen.target(torch.device(device)), parameters)
        return known, any(one.runs_live_weights for one in usable)
    except (Unavailable, RuntimeError):  # no such backend, or no such device any more
        return None, False


def serves_any_size(backend: str, device: str) -> bool:
    """Tell whether live weights serve what an engine was not built for, so that no size has to run native."""
    try:
        return any(one.runs_live_weights for one in usable_backends(backend, torch.device(device)))
    except (Unavailable, RuntimeError):  # as above
        return False
