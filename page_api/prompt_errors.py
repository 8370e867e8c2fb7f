"""Errors of prompts in one sentence, in ComfyUI's own words: for prompts that it refuses, and for prompts that fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def refusal(error: Mapping[str, Any] | None, refused: Mapping[str, Any]) -> str | None:
    """Return why a prompt, or one of its nodes, was refused by ``validate_prompt``; None where all is well.

    Args:
        error: ComfyUI's error on the prompt, or None.
        refused: node id -> ComfyUI's errors on that node.
    """
    for node, found in refused.items():
        if not found.get("errors"):
            continue
        first, where = found["errors"][0], f"{found['class_type']} (node {node})"
        extra = first.get("extra_info", {})
        if first["type"] == "value_not_in_list" and extra["input_name"].endswith("_name"):
            file = extra["received_value"]
            return f"{file} is missing: put it where {where} looks, or choose another file."
        return f"{where}: {first['message']}: {first['details']}."
    return None if error is None else f"{str(error['message']).rstrip('.')}."


def failure(messages: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Return why a prompt that ran failed, from its status messages; None where it did not."""
    for event, data in messages:
        if event == "execution_error":
            what = data["exception_message"].strip() or data["exception_type"]
            return f"{data['node_type']} (node {data['node_id']}): {what.rstrip('.')}."
        if event == "execution_interrupted":
            return "It was interrupted."
    return None
