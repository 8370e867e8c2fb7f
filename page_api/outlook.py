"""Forecast for an engine node before it runs: why there is no engine yet, and how long a build takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import folder_paths
import torch
from comfy_execution.graph import DynamicPrompt
from safetensors import SafetensorError, safe_open

from ..architectures import Role, may_be_served, patch_nodes
from ..architectures.shapes import SIZE_NAMES, Picture, RequestedSizes
from ..backends import AUTO, lookup
from ..backends.lookup import usable_backends
from ..engine_builder.expected_time import expected
from ..engine_library import Fallback, Library, Reason, Unavailable
from ..node_names import CONTROLNET_ENGINE, UNET_ENGINE, VAE_ENGINE
from .workflow_graph import NETWORK_INPUT, VAE_ENCODER, class_of, inputs_of, model_name, upstream

KINDS = {
    UNET_ENGINE: Role.BACKBONE.value, CONTROLNET_ENGINE: Role.CONTROLNET.value,
    VAE_ENGINE: Role.VAE_DECODER.value, VAE_ENCODER: Role.VAE_ENCODER.value,
}
VAES = (Role.VAE_DECODER, Role.VAE_ENCODER)
FOLDERS = {Role.BACKBONE.value: ("checkpoints", "diffusion_models"), Role.CONTROLNET.value: ("controlnet",)}
"""Kind of network -> folders of its files, where a file determines the network."""


@dataclass(frozen=True)
class NodeRequest:
    """Request of an engine node, as far as its prompt shows it.

    Attributes:
        kind: a value of ``Role``.
        label: the model's file, or ``""``.
        lora: whether a LoRA before the node changes its engine.
        backend: the node's choice.
        sizes: the node's numbers; None where the prompt does not have them.
        pictures: the graph's pictures.
        of_all_uses: the pictures of all uses of the node, if its subgraph is used several times.
        samplers: the samplers of all its uses.
        precision: the node's choice.
        replaceable: whether it requests an engine that takes any weights.
        patched: whether a model patch before the node changes its engine.
        workflow: id of the prompt's workflow, ``""`` if not known.
    """

    kind: str
    label: str
    lora: bool
    backend: str
    sizes: RequestedSizes | None = None
    pictures: tuple[Picture, ...] = ()
    of_all_uses: tuple[Picture, ...] = ()
    samplers: tuple[str, ...] = ()
    precision: str = AUTO
    replaceable: bool = False
    patched: bool = False
    workflow: str = ""

    def is_of(self, label: str) -> bool:
        """Tell whether a network's label names the model's file; a VAE's has words before it."""
        return bool(self.label) and (label == self.label or label.endswith(f": {self.label}"))


def request_of(prompt: Mapping[str, Any], node_id: str) -> NodeRequest:
    """Return the request of a node of an API prompt. The node is for a single network, and the prompt is
    checked: its nodes have a key."""
    graph = DynamicPrompt(dict(prompt))
    kind = str(prompt[node_id]["class_type"])
    name = NETWORK_INPUT[kind]
    before, inputs = list(upstream(graph, node_id, (name,))), inputs_of(graph, node_id)
    above = [inputs_of(graph, one) for one in before]
    patched = any(class_of(prompt, one) in patch_nodes() for one in before)
    lora = any("lora" in str(key).lower() for inputs in above for key in inputs)
    replaceable = inputs.get("weights") == "replaceable"
    lora = lora and KINDS[kind] not in VAES and not replaceable
    backend = inputs.get("backend")
    backend = backend if isinstance(backend, str) else ""
    numbers = {size: inputs.get(size, 0) for size in SIZE_NAMES}
    sizes = RequestedSizes(**numbers) if all(isinstance(n, int) for n in numbers.values()) else None
    precision = str(inputs.get("precision", AUTO))
    return NodeRequest(KINDS[kind], model_name(graph, node_id, name, ""), lora, backend, sizes,
                       precision=precision, replaceable=replaceable, patched=patched)  # fmt: skip


def parameters_of(request: NodeRequest, like: int, like_bytes: int) -> int:
    """Estimate a model's parameters from the size of its file, by the ratio of a similar model.

    0 when there is no such file.

    Args:
        like, like_bytes: that model's parameters and the size of its file.
    """
    with contextlib.suppress(OSError):
        if like_bytes and (path := _file_of(request)) is not None:
            return round(like * os.path.getsize(path) / like_bytes)
    return 0


def refused_by_file(request: NodeRequest) -> Fallback | None:
    """Return why a model can have no engine, judged by the names in its file; None where that is not certain."""
    path = _file_of(request)
    if path is None or not path.endswith(".safetensors"):
        return None
    with contextlib.suppress(OSError):
        stat = os.stat(path)
        if not _may_be_served(path, stat.st_size, stat.st_mtime_ns):
            return Fallback(Reason.UNSUPPORTED_MODEL, f"{request.label} is a model of a family without engines")
    return None


@lru_cache(maxsize=256)
def _may_be_served(path: str, _size: int, _mtime_ns: int) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return may_be_served(file.keys())
    except (OSError, SafetensorError):  # the loader will report the error
        return True


def _file_of(request: NodeRequest) -> str | None:
    """Return the path of the file that a loader names, or None."""
    for folder in FOLDERS.get(request.kind, ()):
        with contextlib.suppress(OSError, ValueError):  # Windows refuses some names
            if request.label and (path := folder_paths.get_full_path(folder, request.label)) is not None:
                return path
    return None


def seconds(
    library: Library, backend: str, device: str, kind: str, family: str, precision: str, parameters: int
) -> float | None:
    """Return the seconds of a build here; None when not known."""
    try:
        chosen = usable_backends(backend, torch.device(device))[0]
        target = chosen.target(torch.device(device))
    except (Unavailable, RuntimeError):  # no such backend, or no such device any more
        return None
    return expected(library, kind, family, chosen.name, precision, target, parameters)


def builds_by_itself(backend: str, device: str, architecture: str) -> bool:
    """Tell whether a node with the choice ``auto`` orders a build in the background."""
    try:
        return lookup.builds_by_itself(backend, torch.device(device), architecture)
    except RuntimeError:  # as in ``seconds``
        return False


def serves_live(kind: str, backend: str, device: str) -> bool:
    """Tell whether live weights serve a network without an engine, and sizes that its engine was not built for."""
    try:
        return kind not in VAES and any(one.runs_live_weights for one in usable_backends(backend, torch.device(device)))
    except (Unavailable, RuntimeError):  # as in ``seconds``
        return False
