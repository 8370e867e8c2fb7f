"""Changes saved workflows for tools and tests; they become API prompts as on the pack's command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

_STANDALONE = Path(__file__).resolve().parent.parent / "engine_builder" / "standalone.py"
_spec = importlib.util.spec_from_file_location("hybrid_trt_standalone", _STANDALONE)
_standalone = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_standalone)
_standalone.load_pack()

from hybrid_trt.saved_workflows.graph import BYPASSED, Node, WorkflowError  # noqa: E402
from hybrid_trt.saved_workflows.to_prompt import (  # noqa: E402
    VIRTUAL,
    ObjectInfo,
    Prompt,
    Workflow,
    assign,
    input_specs,
    to_prompt,
    widgets_of,
)

__all__ = ["VIRTUAL", "ObjectInfo", "Prompt", "Workflow", "WorkflowError", "bypass", "set_widget", "to_prompt"]


def set_widget(workflow: Workflow, node: str, widget: str, value: Any, object_info: ObjectInfo) -> None:
    """Set a widget on all nodes of a type, or of a title, in place.

    A sub-widget of a dynamic combo is called `rows.strength_1`; set the combo itself first.

    Raises:
        WorkflowError: no such node, or no such widget on it.
    """
    for found in _find(workflow, node):
        values = {w.name: w.value for w in widgets_of(found, object_info)}
        if widget not in values:
            raise WorkflowError(f"{node} has no widget {widget!r}; it has {', '.join(values) or 'none'}")
        values[widget] = value
        inputs = input_specs(object_info[found["type"]]["input"], object_info[found["type"]].get("input_order"))
        found["widgets_values"] = [w.value for w in assign(inputs, "", values.get)]


def bypass(workflow: Workflow, nodes: Collection[str]) -> None:
    """Bypass all nodes of these types or titles, in place: what comes in goes out, by type.

    Raises:
        WorkflowError: no such node.
    """
    for name in nodes:
        for node in _find(workflow, name):
            node["mode"] = BYPASSED


def _find(workflow: Workflow, name: str) -> list[Node]:
    found = [node for node in workflow["nodes"] if name in (node["type"], node.get("title"))]
    if not found:
        raise WorkflowError(f"no node of type or title {name!r} in the workflow")
    return found
