"""Pictures that a prompt asks an engine node's network for, found before it runs; on the page: ``fit.mjs``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from server import PromptServer

from ..architectures.sizes import Picture
from ..comfy_model.comfyui_internals import Feature, works
from .workflow_graph import is_link

MAX_PICTURES, MAX_NUMBER = 16, 100_000
_EMPTY = re.compile("empty.*latent", re.IGNORECASE)


def asked_pictures(prompt: Mapping[str, Any], node_id: str) -> tuple[Picture, ...]:
    """Return the pictures of the samplers that call a node's network, where these are empty latents of plain numbers.

    They are at most ``MAX_PICTURES``.
    """
    found = (_picture(prompt, sampler) for sampler in _samplers(prompt, node_id))
    return tuple(dict.fromkeys(picture for picture in found if picture is not None))[:MAX_PICTURES]


def running_pictures() -> str:
    """Return all empty latents and CFGs of the prompts that are being executed, as a text to compare."""
    server = getattr(PromptServer, "instance", None)  # a process without a server has none
    if server is None or not works(Feature.QUEUE):
        return ""
    running, _ = server.prompt_queue.get_current_queue_volatile()
    found = {str(_picture(item[2], node)) for item in running for node in item[2]}
    return " ".join(sorted(found - {"None"}))


def _samplers(prompt: Mapping[str, Any], node_id: str) -> Iterator[str]:
    readers: dict[str, list[str]] = {}
    for reader in prompt:
        for value in _inputs(prompt, reader).values():
            if is_link(value):
                readers.setdefault(value[0], []).append(reader)
    seen, queue = {node_id}, [node_id]
    while queue:
        current = queue.pop()
        if is_link(_inputs(prompt, current).get("latent_image")):
            yield current  # what it makes goes on to others, which may use other models
            continue
        for reader in readers.get(current, ()):
            if reader not in seen:
                seen.add(reader)
                queue.append(reader)


def _picture(prompt: Mapping[str, Any], sampler: str) -> Picture | None:
    """Return the picture of a sampler, None where it is not certain or the node is none.

    With CFG a call has both prompts, so its batch is twice the images.
    """
    inputs = _inputs(prompt, sampler)
    latent, cfg = inputs.get("latent_image"), inputs.get("cfg")
    if not is_link(latent) or not _EMPTY.search(str(_node(prompt, latent[0]).get("class_type"))):
        return None
    empty = _inputs(prompt, latent[0])
    width, height, images = empty.get("width"), empty.get("height"), empty.get("batch_size", 1)
    if not all(isinstance(n, int) and 0 < n < MAX_NUMBER for n in (width, height, images)):
        return None
    known = isinstance(cfg, int | float) and math.isfinite(cfg)
    batches = (2 * images, images) if not known else (images,) if cfg == 1 else (2 * images,)
    return Picture(width, height, batches)


def _node(prompt: Mapping[str, Any], node_id: str) -> Mapping[str, Any]:
    node = prompt.get(node_id)
    return node if isinstance(node, Mapping) else {}


def _inputs(prompt: Mapping[str, Any], node_id: str) -> Mapping[str, Any]:
    inputs = _node(prompt, node_id).get("inputs")
    return inputs if isinstance(inputs, Mapping) else {}
