"""Reading of a prompt's graph, without running it: nodes upstream, file names, networks of a node, the node key.

Graphs are untrusted: a malformed node counts as missing, so reading never raises, except for keys.

A node key is a hash of an engine node and of all nodes upstream. Two nodes with the same key want the same engine: a
copy, the node in another tab, in a subgraph, after a reload. Node ids and titles are no part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from comfy_execution.graph import DynamicPrompt, NodeNotFoundError
from comfy_execution.graph_utils import is_link

from ..architectures import patch_nodes
from ..architectures.shapes import VAE_SETTINGS
from ..node_names import ACCELERATE, CONTROLNET_ENGINE, STREAM, UNET_ENGINE, VAE_ENGINE, WHEN_MISSING

Node = Mapping[str, Any]
Prompt = Mapping[str, Any]

MODEL_NAME_INPUTS = ("unet_name", "ckpt_name", "control_net_name", "vae_name", "model_name")
VAE_ENCODER = f"{VAE_ENGINE} (encode)"
NETWORK_INPUT = {UNET_ENGINE: "model", CONTROLNET_ENGINE: "control_net", VAE_ENGINE: "vae", VAE_ENCODER: "vae"}
"""Node for one network -> its input with the network. The entry of a VAE's encoder is for keys only."""

DECODE, ENCODE = "vae", "vae:encode"
"""Names of a VAE's two networks among the inputs of a node. The input's name ends before the colon."""

_PICTURES = re.compile(r"(?!clip_vision)([\w.]+[_.])?(image|pixels|video|frame)s?_?\d*")
"""Names of inputs for pictures, such as "start_image", "image2" and "last_frame"."""

_IGNORED = (WHEN_MISSING, "opt_size")
"""Inputs that do not change the engine; an engine with another best size serves too."""
MAX_DEPTH = 200
MAX_NESTING = 50
_MISSING: Node = {"class_type": "", "inputs": {}}


class BadPrompt(ValueError):
    """A prompt without a key; the text is for the user."""


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


def upstream(
    prompt: DynamicPrompt, node_id: str, first_inputs: tuple[str, ...] | None = None,
    inputs: tuple[str, ...] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield the ids of the nodes that a node depends on, the nearest first, itself not included.

    Args:
        first_inputs: follow only these inputs of the node itself.
        inputs: follow only these inputs of the other nodes; by default all.
    """
    seen, queue = {node_id}, [(node_id, first_inputs)]
    while queue:
        current, allowed = queue.pop(0)
        for name, value in inputs_of(prompt, current).items():
            if (allowed is None or name in allowed) and is_link(value) and value[0] not in seen:
                seen.add(value[0])
                queue.append((value[0], inputs))
                yield value[0]


def drawn_id(prompt: DynamicPrompt, node_id: str) -> str:
    """Return the node of the user's graph behind a node: nodes that other nodes made are copies or parts of it.

    Loops make copies of the nodes inside for each iteration.
    """
    shown = prompt.get_display_node_id(node_id)
    return shown if shown in prompt.get_original_prompt() else prompt.get_real_node_id(node_id)


def drawn_upstream(prompt: DynamicPrompt, node_id: str) -> Iterator[str]:
    """Yield the ids of the nodes that a node depends on in the user's graph.

    ComfyUI takes the links into a loop from the node that ends it, once the loop runs.
    """
    return upstream(DynamicPrompt(prompt.get_original_prompt()), drawn_id(prompt, node_id))


def all_nodes(prompt: DynamicPrompt) -> dict[str, Any]:
    """Return the user's graph with the nodes that other nodes made so far, as an API prompt without malformed nodes."""
    own = prompt.get_original_prompt()
    every = (*own, *sorted(prompt.all_node_ids() - own.keys()))
    return nodes_of({node_id: prompt.get_node(node_id) for node_id in every})


def model_name(prompt: DynamicPrompt, node_id: str, input_name: str, default: str) -> str:
    """Return the file of a loader upstream of an input, or ``default``.

    The nearest loader in a row of nodes that pass the input on, else the nearest of all.
    """
    own = (input_name.partition(":")[0],)
    for node in (*upstream(prompt, node_id, own, own), *upstream(prompt, node_id, own)):
        inputs = inputs_of(prompt, node)
        for name in MODEL_NAME_INPUTS:
            if isinstance(inputs.get(name), str):
                return inputs[name]
    return default


def loras_before(prompt: DynamicPrompt, node_id: str, input_name: str) -> str:
    """Return the LoRAs upstream of a model's input, with their strengths; ``""`` without LoRAs."""
    found = []
    for node in upstream(prompt, node_id, (input_name,), ("model",)):
        inputs = inputs_of(prompt, node)
        rows = [{"lora": inputs.get("lora_name"), "strength": inputs.get("strength_model", 1), "on": True}]
        for row in [*rows, *inputs.values()]:  # some packs' nodes have an object for each
            if isinstance(row, Mapping) and row.get("on") and isinstance(row.get("lora"), str) and row.get("strength"):
                strength, name = row["strength"], re.split(r"[\\/]", row["lora"])[-1].removesuffix(".safetensors")
                found.append(f"{name} x {strength:g}" if isinstance(strength, int | float) else name)
    return f"LoRA {', '.join(reversed(found))}" if found else ""


def whole_prompt(prompt: DynamicPrompt, node_id: str) -> dict[str, Any]:
    """Return a node and all nodes that it depends on, as an API prompt without malformed nodes."""
    found = {current: node_of(prompt, current) for current in (node_id, *upstream(prompt, node_id))}
    return {current: node for current, node in found.items() if node["class_type"]}


def network_inputs(prompt: Mapping[str, Any], node_id: str) -> list[str]:
    """Return the inputs of an engine node that bring a network: several for TRT Accelerate and VAEs, else one."""
    kind, inputs = class_of(prompt, node_id), inputs_of(prompt, node_id)
    if kind == VAE_ENGINE:
        return vae_calls(prompt, node_id)
    if kind != ACCELERATE:
        return [NETWORK_INPUT[kind]] if kind in NETWORK_INPUT else []
    wired = (name for name, value in inputs.items() if name.startswith("control_net_") and is_link(value))
    vae = vae_calls(prompt, node_id) if is_link(inputs.get("vae")) else []
    return ["model", *sorted(wired), *vae]


def vae_calls(prompt: Mapping[str, Any], node_id: str) -> list[str]:
    """Return which networks of a VAE the graph calls behind a node: ``DECODE``, ``ENCODE`` or both.

    A reader of latents decodes. A reader of pictures encodes, also one that begins a video with them, except
    ControlNets: few of these encode. Without such readers, pictures are decoded.
    """
    found = {name for name, _ in vae_readers(prompt, node_id)}
    return [name for name in (DECODE, ENCODE) if name in found] or [DECODE]


def vae_readers(prompt: Mapping[str, Any], node_id: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the network that each reader of a VAE calls, and the reader's inputs."""
    output = [node_id, 1 if class_of(prompt, node_id) == ACCELERATE else 0]
    for reader in prompt:
        inputs = inputs_of(prompt, reader)
        if output in inputs.values():
            if class_of(prompt, reader) == STREAM:
                yield DECODE, inputs
                if inputs.get("denoise") != 1:
                    yield ENCODE, inputs
                continue
            takes = {name for name, value in inputs.items() if is_link(value)}
            if "samples" in takes:
                yield DECODE, inputs
            elif any(map(_PICTURES.fullmatch, takes)) and not any("control_net" in name for name in takes):
                yield ENCODE, inputs


def for_one_network(prompt: Mapping[str, Any], node_id: str, input_name: str) -> Mapping[str, Any]:
    """Return a prompt in which the engine node is replaced by a node for the network of this input only."""
    inputs = inputs_of(prompt, node_id)
    if class_of(prompt, node_id) not in (ACCELERATE, VAE_ENGINE):
        return prompt
    settings = {name: value for name, value in inputs.items()
                if name not in ("model", "vae") and not name.startswith("control_net_")}  # fmt: skip
    kinds = {"model": UNET_ENGINE, DECODE: VAE_ENGINE, ENCODE: VAE_ENCODER}
    kind = kinds.get(input_name, CONTROLNET_ENGINE)
    if kind in (VAE_ENGINE, VAE_ENCODER):
        settings = {name: value for name, value in settings.items() if name in VAE_SETTINGS}
    network = inputs.get(input_name.partition(":")[0])
    return {**prompt, node_id: {"class_type": kind, "inputs": {NETWORK_INPUT[kind]: network, **settings}}}


def node_key(prompt: Mapping[str, Any], node_id: str) -> str:
    """Return the key of a node of an API prompt.

    Raises:
        BadPrompt: the node or a node upstream is missing, malformed or part of a loop.
    """
    return _key(prompt, node_id, {}, ())


def _key(prompt: Mapping[str, Any], node_id: str, known: dict[str, str], path: tuple[str, ...]) -> str:
    if node_id in known:
        return known[node_id]
    node = prompt.get(node_id)
    if not is_node(node):
        raise BadPrompt(f"the prompt has no node {node_id[:80]!r} with a class and inputs")
    if node_id in path or len(path) > MAX_DEPTH:
        raise BadPrompt(f"the prompt has a loop or is too deep at node {node_id[:80]!r}")
    inputs, decides = {}, patch_nodes().get(node["class_type"])
    for name, value in node["inputs"].items():
        if name not in _IGNORED and (decides is None or name in decides):
            inputs[name] = (
                [_key(prompt, value[0], known, (*path, node_id)), value[1]] if is_link(value) else _plain(value)
            )
    text = json.dumps([node["class_type"], inputs], sort_keys=True, default=str)
    known[node_id] = hashlib.sha256(text.encode()).hexdigest()[:24]
    return known[node_id]


def _plain(value: Any, depth: int = MAX_NESTING) -> Any:
    """Return a value for keys: ComfyUI turns 1 into 1.0 where a node takes a float, so both are equal."""
    if isinstance(value, int) and abs(value) >= 1 << 1023:
        raise BadPrompt("the prompt has a number that no node can use")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    if isinstance(value, dict | list) and depth == 0:
        raise BadPrompt("the prompt has a value that is nested too deeply")
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item, depth - 1) for name, item in value.items()}
    return value
