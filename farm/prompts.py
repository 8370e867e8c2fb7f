"""API workflows in the farm: their models, their seeds, and the farm's additions."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Prompt = dict[str, Any]
REPORT = "farm_report"
MARK = "farm_prompt"
"""An input that no node has: with it, ComfyUI ignores the node's cached result and runs it anew."""
_MODELS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_SEEDS = ("seed", "noise_seed")


def is_prompt(data: Any) -> bool:
    """Tell whether data is a workflow in API format."""
    return isinstance(data, Mapping) and bool(data) and all(
        isinstance(node, Mapping) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)
        for node in data.values()
    )  # fmt: skip


def models_key(prompt: Prompt) -> str:
    """Return a short text that is the same for workflows with the same model files, whatever their LoRAs."""
    named = {f"{name}={value}" for _, name, value in inputs_of(prompt) if _is_model(value) and "lora" not in name}
    return hashlib.sha256("\n".join(sorted(named)).encode("utf-8", "replace")).hexdigest()[:16]


def with_seed(prompt: Prompt, seed: int) -> Prompt:
    """Return a copy of a workflow with all seeds that are numbers replaced.

    Raises:
        ValueError: it has no such seed.
    """
    seeded, found = copy.deepcopy(prompt), False
    for inputs, name, value in inputs_of(seeded):
        if name in _SEEDS and isinstance(value, int):
            inputs[name], found = seed, True
    if not found:
        raise ValueError(f"No node of the workflow has an input named {' or '.join(_SEEDS)} with a number.")
    return seeded


def prepared(prompt: Prompt, mark: str, savers: Collection[str]) -> Prompt:
    """Return a copy of a workflow with a report, whose nodes of some classes run despite ComfyUI's cache.

    Args:
        mark: a text that no other prompt has.
        savers: classes whose files are gone.
    """
    ready = copy.deepcopy(prompt)
    for node in ready.values():
        if node["class_type"] in savers:
            node["inputs"][MARK] = mark
    if all(node["class_type"] != "TRTReport" for node in ready.values()) and (link := _last_link(ready)) is not None:
        ready[REPORT] = {"class_type": "TRTReport", "inputs": {"after": link, "time_calls": False}}
    return ready


def _last_link(prompt: Prompt) -> list[Any] | None:
    """Return a link into a node at the workflow's end, whose result no other node uses."""
    used = {value[0] for _, _, value in inputs_of(prompt) if _is_link(value)}
    ends = (node for key, node in prompt.items() if key not in used)
    return next((value for node in ends for value in node["inputs"].values() if _is_link(value)), None)


def inputs_of(prompt: Prompt) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield each input of a workflow: the inputs of its node, its name, its value."""
    for node in prompt.values():
        for name, value in list(node["inputs"].items()):
            yield node["inputs"], name, value


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts in a value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _is_model(value: Any) -> bool:
    return isinstance(value, str) and value.lower().endswith(_MODELS)
