"""Pictures that a graph asks for: the sizes that its samplers and VAEs are called with, as far as the graph shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from comfy_execution.graph_utils import is_link

from ..architectures.shapes import Picture
from ..node_names import STREAM
from ..streaming.frames import STEPS_AS_BATCH
from .workflow_graph import DECODE, ENCODE, MAX_DEPTH, class_of, inputs_of, vae_readers

MAX_PICTURES, MAX_NUMBER, MAX_CFG = 16, 100_000, 1e6
_EMPTY = re.compile("empty.*latent", re.IGNORECASE)
_OF_VIDEO = {"width", "height", "length", "batch_size"}
"""Inputs of nodes that make the latent of a video, mostly with its conditionings."""

_OF_ONE_PROMPT = {"model", "conditioning"}
"""Inputs of a guider that samples with one prompt, without CFG."""


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
    sides = [inputs.get("tile_size") for name, inputs in vae_readers(prompt, node_id) if name == input_name]
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
    """Return the CFG of a sampler or its guider; 1 for a guider of a single prompt, None where it is not certain."""
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
