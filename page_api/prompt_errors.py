"""Errors of prompts in one sentence, in ComfyUI's own words: of one that it refuses, and of one that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def refusal(error: Mapping[str, Any] | None, refused: Mapping[str, Any]) -> str | None:
    """Return why a prompt, or one of its nodes, was refused by ``validate_prompt``; None where all is well.

    Args:
        error: what was told of the prompt, or None.
        refused: node id -> what was told of that node.
    """
    for node, found in refused.items():
        if not found.get("errors"):
            continue
        first, where = found["errors"][0], f"{found['class_type']} (node {node})"
        told = first.get("extra_info", {})
        if first["type"] == "value_not_in_list" and told["input_name"].endswith("_name"):
            file = told["received_value"]
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
