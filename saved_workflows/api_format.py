"""API prompts as workflows: the same code rewires them, and all else stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .graph import Graph, Workflow, WorkflowError, as_workflow_error, change
from .to_prompt import ObjectInfo, Prompt, is_link, widgets_of

T = TypeVar("T")


def is_prompt(data: Any) -> bool:
    """Tell whether data is a workflow in API format."""
    entries = list(data.values()) if isinstance(data, Mapping) else [None]
    return bool(entries) and all(isinstance(one, Mapping) and isinstance(one.get("class_type"), str)
                                 and isinstance(one.get("inputs"), dict) for one in entries)  # fmt: skip


def change_prompt(prompt: Prompt, object_info: ObjectInfo, how: Callable[[Workflow], T]) -> T:
    """Change an API prompt in place by a function for workflows, and return its result.

    Raises:
        WorkflowError: it has nodes that ComfyUI does not know, or is damaged.
    """
    def changed(workflow: Workflow) -> tuple[T, Graph]:
        return how(workflow), workflow.root

    with as_workflow_error():
        return _changed(prompt, object_info, changed)


def _changed(prompt: Prompt, object_info: ObjectInfo, how: Callable[[Workflow], tuple[T, Graph]]) -> T:
    answer, graph = change(_drawn(prompt, object_info), how)
    for gone in prompt.keys() - set(map(str, graph.nodes)):
        del prompt[gone]
    for node in graph.nodes.values():
        entry = prompt.setdefault(str(node["id"]), {"class_type": node["type"], "inputs": {
            widget.name: widget.value for widget in widgets_of(node, object_info) if widget.sent
        }})  # fmt: skip
        for socket in node["inputs"]:
            link = graph.links.get(socket["link"])
            if link is not None:
                entry["inputs"][socket["name"]] = [str(link.origin), link.slot]
            elif socket["link"] is None:
                entry["inputs"].pop(socket["name"], None)
    return answer


def _drawn(prompt: Prompt, object_info: ObjectInfo) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    links: list[list[Any]] = []
    for key, entry in prompt.items():
        info = object_info.get(entry["class_type"])
        if info is None:
            raise WorkflowError(f"ComfyUI has no node {entry['class_type']} (node {key} of the workflow)")
        kinds = {name: spec[0] for group in info["input"].values() if isinstance(group, Mapping)
                 for name, spec in group.items()}  # fmt: skip
        node = {"id": key, "type": entry["class_type"], "inputs": [],
                "widgets_values": [value for value in entry["inputs"].values() if isinstance(value, str)]}  # fmt: skip
        for name, value in entry["inputs"].items():
            if is_link(value) and value[0] in prompt:
                kind = _kind(kinds.get(name, "*"))
                links.append([len(links) + 1, value[0], value[1], key, len(node["inputs"]), kind])
                node["inputs"].append({"name": name, "type": kind, "link": len(links)})
        node["outputs"] = [{"name": str(made), "type": _kind(made), "links": []} for made in info["output"]]
        nodes.append(node)
    return {"version": 0.4, "nodes": nodes, "links": links}


def _kind(declared: Any) -> str:
    """Return a type as workflows have it: types that depend on other inputs become any."""
    return "*" if not isinstance(declared, str) or declared.startswith("COMFY_") else declared
