"""Orders of builds: a press on Build is a prompt of its own, and ``extra_data`` of the prompt carries the order.

ComfyUI hands ``extra_data`` from the request to the queue as it is; its history shows the press like any other prompt.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from comfy_execution.graph import DynamicPrompt
from server import PromptServer

from ..comfy_model.comfyui_internals import Feature, works
from .graph_pictures import picture_of
from .workflow_graph import BadPrompt, for_one_network, network_inputs, node_key, upstream

ORDER = "hybrid_trt_build"
"""Key of the order in ``extra_data``: ``{"nodes": [ids], "missing_only": bool, "graph": API prompt}``.

``graph`` is the whole workflow, of which the prompt holds only what the nodes depend on.
"""

WARM = "hybrid_trt_warm"
"""Key in ``extra_data`` of a prompt for warming: it opens engines and builds none."""


@dataclass(frozen=True)
class Order:
    """Builds that a prompt orders.

    Attributes:
        nodes: ids of the engine nodes.
        missing_only: build only what is missing; else build again what is there.
        graph: the workflow with all links and sizes, as an API prompt; empty when the page sent none.
    """

    nodes: frozenset[str]
    missing_only: bool
    graph: Mapping[str, Any]


class Queued(NamedTuple):
    """A prompt in ComfyUI's queue."""

    prompt_id: str
    prompt: Mapping[str, Any]
    extra: Any
    outputs: tuple[str, ...]


def order_of(prompt_id: str) -> Order | None:
    """Return the order that a running prompt carries, or None."""
    running, _ = queued()
    return next((_read(item.extra) for item in running if item.prompt_id == prompt_id), None)


def warms(prompt_id: str) -> bool:
    """Tell whether a running prompt is for warming."""
    running, _ = queued()
    return any(item.prompt_id == prompt_id and isinstance(item.extra, Mapping) and item.extra.get(WARM) is True
               for item in running)  # fmt: skip


@lru_cache(maxsize=100)  # each look makes ComfyUI copy a prompt's history
def workflow_of(prompt_id: str) -> str:
    """Return the id of the workflow of a prompt that runs or has run; ``""`` where it has none."""
    running, _ = queued()
    extra: Any = next((item.extra for item in running if item.prompt_id == prompt_id), None)
    server = getattr(PromptServer, "instance", None)
    if extra is None and server is not None and works(Feature.QUEUE):
        ended = server.prompt_queue.get_history(prompt_id=prompt_id).get(prompt_id, {}).get("prompt")
        extra = _queued(ended).extra if _is_queued(ended) else None
    for name in ("extra_pnginfo", "workflow", "id"):
        extra = extra.get(name) if isinstance(extra, Mapping) else None
    return extra if isinstance(extra, str) else ""


def running_orders() -> str:
    """Return the ids of the running prompts that carry an order: ComfyUI must not answer these from its cache."""
    running, _ = queued()
    return " ".join(sorted(item.prompt_id for item in running if _read(item.extra)))


def running_pictures() -> str:
    """Return all empty latents and CFGs of the prompts that are being executed, as a text to compare."""
    running, _ = queued()
    found = {str(picture_of(item.prompt, node)) for item in running for node in item.prompt}
    return " ".join(sorted(found - {"None"}))


class PendingOrders:
    """Builds that queued prompts have yet to order; each prompt is read once. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, set[str]] = {}  # prompt id -> keys; empty for a prompt that orders nothing

    def by_prompt(self) -> dict[str, list[str]]:
        """Return prompt id -> the keys of the engine nodes whose builds the prompt has yet to order."""
        with self._lock:
            return {item.prompt_id: sorted(keys) for item in self._in_queue() if (keys := self._keys_of(item))}

    def forget(self, prompt_id: str, key: str) -> None:
        """Note that a running prompt has ordered a node's build, or that it can have none. Reads no other prompt."""
        with self._lock:
            for item in self._in_queue():
                if item.prompt_id == prompt_id:
                    self._keys_of(item).discard(key)

    def _in_queue(self) -> list[Queued]:
        """Return the prompts that wait or run, and forget the keys of all other prompts."""
        running, waiting = queued()
        items = [*running, *waiting]
        self._keys = {item.prompt_id: self._keys[item.prompt_id] for item in items if item.prompt_id in self._keys}
        return items

    def _keys_of(self, item: Queued) -> set[str]:
        if item.prompt_id not in self._keys:
            self._keys[item.prompt_id] = _ordered(item)
        return self._keys[item.prompt_id]


def queued() -> tuple[list[Queued], list[Queued]]:
    """Return the prompts of ComfyUI's queue that run and that wait; none in a process without a server."""
    server = getattr(PromptServer, "instance", None)
    if server is None or not works(Feature.QUEUE):
        return [], []
    running, waiting = server.prompt_queue.get_current_queue_volatile()
    read = [[_queued(item) for item in part if _is_queued(item)] for part in (running, waiting)]
    return read[0], read[1]


def _is_queued(item: Any) -> bool:
    return isinstance(item, Sequence) and len(item) >= 3 and isinstance(item[1], str) and isinstance(item[2], Mapping)


def _queued(item: Sequence[Any]) -> Queued:
    _number, prompt_id, prompt, extra, outputs, *_ = (*item, None, None)
    given = outputs if isinstance(outputs, list | tuple | set) else ()
    return Queued(prompt_id, prompt, extra, tuple(node for node in given if isinstance(node, str)))


def _read(extra: Any) -> Order | None:
    """Return the order in a prompt's ``extra_data``, which any client may have sent; None where there is none."""
    given = extra.get(ORDER) if isinstance(extra, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(given.get("nodes"), list):
        return None
    graph = given.get("graph")
    nodes = frozenset(node for node in given["nodes"] if isinstance(node, str))
    return Order(nodes, given.get("missing_only") is True, graph if isinstance(graph, Mapping) else {})


def _ordered(item: Queued) -> set[str]:
    """Return the keys of the nodes whose builds a prompt orders; it runs only what a valid output needs."""
    order = _read(item.extra)
    if order is None:
        return set()
    graph, keys = DynamicPrompt(dict(item.prompt)), set()
    runs = {node for output in item.outputs for node in upstream(graph, output)}
    for node in order.nodes & runs:
        for name in network_inputs(order.graph if node in order.graph else item.prompt, node):
            with contextlib.suppress(BadPrompt):  # a node without a key has no state
                keys.add(node_key(for_one_network(item.prompt, node, name), node))
    return keys
