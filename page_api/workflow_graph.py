"""Reading of a prompt's graph, without running it: nodes upstream, file names, requested pictures, the node key.

A node key is a hash of an engine node and of all nodes upstream. Two nodes with the same key want the same engine: a
copy, the node in another tab, in a subgraph, after a reload. Node ids and titles are no part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import is_link

from ..architectures import patch_nodes
from ..architectures.shapes import VAE_SETTINGS, Picture
from ..node_names import ACCELERATE, CONTROLNET_ENGINE, STREAM, UNET_ENGINE, VAE_ENGINE, WHEN_MISSING
from ..streaming.frames import STEPS_AS_BATCH
from .read_graph import class_of, inputs_of, is_node, node_of, nodes_of

MODEL_NAME_INPUTS = ("unet_name", "ckpt_name", "control_net_name", "vae_name", "model_name")
VAE_ENCODER = f"{VAE_ENGINE} (encode)"
NETWORK_INPUTS = {
    UNET_ENGINE: ("model",), CONTROLNET_ENGINE: ("control_net",), VAE_ENGINE: ("vae",), VAE_ENCODER: ("vae",),
}
"""Node for one network -> its inputs of networks. The entry of a VAE's encoder is for keys only."""

DECODE, ENCODE = "vae", "vae:encode"
"""Names of a VAE's two networks among the inputs of a node. The input's name ends before the colon."""

MAX_PICTURES, MAX_NUMBER, MAX_CFG = 16, 100_000, 1e6
_EMPTY = re.compile("empty.*latent", re.IGNORECASE)
_OF_VIDEO = {"width", "height", "length", "batch_size"}
"""Inputs of nodes that make the latent of a video, mostly with its conditionings."""

_OF_ONE_PROMPT = {"model", "conditioning"}
"""Inputs of a guider that samples with one prompt, without CFG."""

_IGNORED = (WHEN_MISSING, "opt_size")
"""Inputs that do not change the engine; an engine with another best size serves too."""
MAX_DEPTH = 200
MAX_NESTING = 50


class BadPrompt(ValueError):
    """A prompt without a key; the text is for the user."""


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


def asked_pictures(prompt: Mapping[str, Any], node_id: str, input_name: str) -> tuple[Picture, ...]:
    """Return the pictures that the network of an input is called with, as far as the graph shows."""
    sampled = pictures_of(prompt, samplers_of(prompt, node_id, readers_of(prompt)))
    return called_with(prompt, node_id, input_name, sampled)


def called_with(
    prompt: Mapping[str, Any], node_id: str, input_name: str, sampled: tuple[Picture, ...]
) -> tuple[Picture, ...]:
    """Return the pictures that a network is called with, from the sampled ones: a VAE may take tiles.

    It takes all tiles in three shapes: square, upright and lying. No tile is larger than its picture; the last
    tiles of a row may be smaller, and are known once they ran.
    """
    if input_name not in (DECODE, ENCODE):
        return sampled
    sides = [inputs.get("tile_size") for name, inputs in _vae_readers(prompt, node_id) if name == input_name]
    known = [side for side in sides if isinstance(side, int) and 0 < side < MAX_NUMBER]
    shapes = [shape for s in known for shape in ((s, s), (s // 2, 2 * s), (2 * s, s // 2))]
    most = [(picture.width, picture.height) for picture in sampled] or [(MAX_NUMBER, MAX_NUMBER)]
    tiles = [Picture(min(width, w), min(height, h), (1,)) for width, height in shapes for w, h in most]
    whole = sampled if len(known) < len(sides) or not sides else ()
    return tuple(dict.fromkeys((*whole, *tiles)))[:MAX_PICTURES]


def pictures_of(prompt: Mapping[str, Any], samplers: Iterable[str]) -> tuple[Picture, ...]:
    """Return the pictures of some samplers, where these are empty latents, or a stream's frames, of plain numbers.

    They are at most ``MAX_PICTURES``.
    """
    found = (picture_of(prompt, sampler) for sampler in samplers)
    return tuple(dict.fromkeys(picture for picture in found if picture is not None))[:MAX_PICTURES]


def readers_of(prompt: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return node -> the nodes that its outputs lead to."""
    readers: dict[str, list[str]] = {}
    for reader in prompt:
        for value in inputs_of(prompt, reader).values():
            if is_link(value):
                readers.setdefault(value[0], []).append(reader)
    return readers


def samplers_of(prompt: Mapping[str, Any], node_id: str, readers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the samplers that call a node's network, or whose latents it decodes."""
    seen, queue = {node_id}, [node_id]
    while queue:
        current = queue.pop()
        if is_link(inputs_of(prompt, current).get("latent_image")) or class_of(prompt, current) == STREAM:
            yield current  # its results go on to nodes that may use other models
            continue
        latent = inputs_of(prompt, current).get("samples")
        if is_link(latent) and is_link(inputs_of(prompt, latent[0]).get("latent_image")):
            yield latent[0]
        for reader in readers.get(current, ()):
            if reader not in seen:
                seen.add(reader)
                queue.append(reader)


def picture_of(prompt: Mapping[str, Any], sampler: str) -> Picture | None:
    """Return the picture of a sampler, None where it is not certain or the node is no sampler."""
    if class_of(prompt, sampler) == STREAM:
        asked = (*_frame_size(prompt, sampler), _frames_at_once(inputs_of(prompt, sampler)), 1)
    else:
        made = _makes_latent(prompt, sampler)
        empty = inputs_of(prompt, made)
        if not (_EMPTY.search(class_of(prompt, made)) or _OF_VIDEO <= empty.keys()):
            return None
        asked = (empty.get("width"), empty.get("height"), empty.get("batch_size", 1), empty.get("length", 1))
    width, height, images, length = (_number(prompt, value) for value in asked)
    if not all(isinstance(n, int) and 0 < n < MAX_NUMBER for n in (width, height, images, length)):
        return None
    return Picture.sampled(width, height, images, _cfg(prompt, sampler), length)


def _makes_latent(prompt: Mapping[str, Any], sampler: str) -> str:
    """Return the node that made a sampler's latent, past samplers that may use other models."""
    for _ in range(MAX_DEPTH):
        latent = inputs_of(prompt, sampler).get("latent_image")
        if not is_link(latent):
            break
        sampler = latent[0]
    return sampler


def _frames_at_once(inputs: Mapping[str, Any]) -> Any:
    """Return the number of a stream's frames that share a call: one, or one at each step."""
    return inputs.get("steps") if inputs.get("steps_as_batch") and inputs.get("sampler_name") in STEPS_AS_BATCH else 1


def _frame_size(prompt: Mapping[str, Any], stream: str) -> tuple[Any, Any]:
    """Return width and height of a stream's frames: from the nearest node upstream that has both."""
    link = inputs_of(prompt, stream).get("frames")
    for _ in range(MAX_DEPTH):
        if not is_link(link):
            break
        inputs = inputs_of(prompt, link[0])
        if "width" in inputs and "height" in inputs:
            return inputs["width"], inputs["height"]
        link = next((inputs[name] for name in ("image", "images", "pixels") if name in inputs), None)
    return None, None


def _cfg(prompt: Mapping[str, Any], sampler: str) -> float | None:
    """Return the CFG of a sampler, or of its guider; 1 for a guider of one prompt, None where it is not certain."""
    inputs = inputs_of(prompt, sampler)
    if is_link(guider := inputs.get("guider")):
        inputs = inputs_of(prompt, guider[0])
        if {name for name, value in inputs.items() if is_link(value)} == _OF_ONE_PROMPT:
            return 1.0
    cfg = _number(prompt, inputs.get("cfg"))
    return cfg if isinstance(cfg, int | float) and abs(cfg) < MAX_CFG else None


def _number(prompt: Mapping[str, Any], value: Any) -> Any:
    """Return an input's value, or the number in ComfyUI's number node that it is linked to."""
    if not is_link(value) or not class_of(prompt, value[0]).startswith("Primitive"):
        return value
    return inputs_of(prompt, value[0]).get("value")


def network_inputs(prompt: Mapping[str, Any], node_id: str) -> list[str]:
    """Return the inputs of an engine node that bring a network: several for TRT Accelerate and VAEs, else one."""
    kind, inputs = class_of(prompt, node_id), inputs_of(prompt, node_id)
    if kind == VAE_ENGINE:
        return vae_calls(prompt, node_id)
    if kind != ACCELERATE:
        return list(NETWORK_INPUTS.get(kind, ()))
    wired = (name for name, value in inputs.items() if name.startswith("control_net_") and is_link(value))
    vae = vae_calls(prompt, node_id) if is_link(inputs.get("vae")) else []
    return ["model", *sorted(wired), *vae]


def vae_calls(prompt: Mapping[str, Any], node_id: str) -> list[str]:
    """Return which networks of a VAE the graph calls behind a node: ``DECODE``, ``ENCODE`` or both.

    A reader of latents decodes, and a reader of pixels encodes, except ControlNets: few of these encode. Without such
    readers, pictures are decoded.
    """
    found = {name for name, _ in _vae_readers(prompt, node_id)}
    return [name for name in (DECODE, ENCODE) if name in found] or [DECODE]


def _vae_readers(prompt: Mapping[str, Any], node_id: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
            elif takes & {"pixels", "image"} and "control_net" not in takes:
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
    return {**prompt, node_id: {"class_type": kind, "inputs": {NETWORK_INPUTS[kind][0]: network, **settings}}}


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
