"""Which prompts are still to order builds: from the press of the button to the job ComfyUI's queue alone knows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from comfy_execution.graph import DynamicPrompt
from server import PromptServer

from ..comfy_model.comfyui_internals import Feature, works
from .node_key import BUILD_REQUEST, ENGINE_NODES, BadPrompt, node_key
from .workflow_graph import upstream


class PendingOrders:
    """What the prompts that wait or run order; each is read once. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, set[str]] = {}  # prompt id -> keys; empty for a prompt that orders nothing

    def by_prompt(self) -> dict[str, list[str]]:
        """Prompt id -> the keys of the engine nodes whose builds it has yet to order."""
        with self._lock:
            self._look()
            return {prompt: sorted(keys) for prompt, keys in self._keys.items() if keys}

    def given(self, prompt_id: str, key: str) -> None:
        """A running prompt has ordered a node's build, or the node can have none."""
        with self._lock:
            self._look()
            self._keys.get(prompt_id, set()).discard(key)

    def _look(self) -> None:
        if PromptServer.instance is None or not works(Feature.QUEUE):
            return
        running, waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
        known, self._keys = self._keys, {}
        for _number, prompt_id, prompt, _extra, outputs, *_ in (*running, *waiting):
            self._keys[prompt_id] = known[prompt_id] if prompt_id in known else _ordered(prompt, outputs)


def _ordered(prompt: Mapping[str, Any], outputs: Iterable[str]) -> set[str]:
    """The keys of the nodes whose builds a prompt orders; it runs only what a valid output needs."""
    asked = [node for node, entry in prompt.items() if _has_request(entry)]
    if not asked:
        return set()
    graph, keys = DynamicPrompt(dict(prompt)), set()
    runs = {node for output in outputs for node in upstream(graph, output)}
    for node in asked:
        try:
            keys |= {node_key(prompt, node)} if node in runs else set()
        except BadPrompt:  # nobody can ask for it by a key
            continue
    return keys


def _has_request(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or entry.get("class_type") not in ENGINE_NODES:
        return False
    return isinstance(entry.get("inputs"), Mapping) and entry["inputs"].get(BUILD_REQUEST) is not None
