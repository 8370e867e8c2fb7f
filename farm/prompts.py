"""API workflows as the farm sees them: their models, their seeds, and what the farm adds to them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

Prompt = dict[str, Any]
REPORT = "farm_report"
_MODELS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_SEEDS = ("seed", "noise_seed")


def is_prompt(data: Any) -> bool:
    """Tell whether something is a workflow in API format."""
    return isinstance(data, Mapping) and bool(data) and all(
        isinstance(node, Mapping) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)
        for node in data.values()
    )  # fmt: skip


def models_key(prompt: Prompt) -> str:
    """Return a short text that is the same for workflows with the same model files, whatever their LoRAs."""
    named = {f"{name}={value}" for _, name, value in inputs_of(prompt) if _is_model(value) and "lora" not in name}
    return hashlib.sha256("\n".join(sorted(named)).encode("utf-8", "replace")).hexdigest()[:16]


def with_seed(prompt: Prompt, seed: int) -> Prompt:
    """Return a copy of a workflow in which every seed that is a number is this one.

    Raises:
        ValueError: it has none.
    """
    seeded, found = copy.deepcopy(prompt), False
    for inputs, name, value in inputs_of(seeded):
        if name in _SEEDS and isinstance(value, int):
            inputs[name], found = seed, True
    if not found:
        raise ValueError(f"No node of the workflow has an input named {' or '.join(_SEEDS)} with a number.")
    return seeded


def prepared(prompt: Prompt, folder: str) -> Prompt:
    """Return a copy of a workflow whose pictures go to a folder of their own, and which has a report."""
    ready = copy.deepcopy(prompt)
    for inputs, name, value in inputs_of(ready):
        if name == "filename_prefix" and isinstance(value, str):
            inputs[name] = f"{folder}/{value}"
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


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _is_model(value: Any) -> bool:
    return isinstance(value, str) and value.lower().endswith(_MODELS)
