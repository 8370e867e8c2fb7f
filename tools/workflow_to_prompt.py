"""Turns a saved workflow (UI format 0.4) into an API prompt as ComfyUI's page does, without a browser.

Not covered, because the shipped workflows have none of it: subgraphs (an error), random choices such as {a|b} and
%replacements% in texts (left as they are), and widgets that other packs' JavaScript makes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

Workflow = dict[str, Any]
Node = dict[str, Any]
Prompt = dict[str, dict[str, Any]]
ObjectInfo = dict[str, Any]
Source = tuple[str, int]

MUTED, BYPASSED = 2, 4
#: Nodes that live in the page only.
VIRTUAL = ("Note", "MarkdownNote", "Reroute", "PrimitiveNode")
WIDGET_TYPES = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO", "COLOR")
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
SEEDS = ("seed", "noise_seed")
UPLOADS = ("image_upload", "video_upload", "animated_image_upload")


class WorkflowError(ValueError):
    """The workflow cannot be converted, or has not what was asked for; the text says what and where."""


def to_prompt(workflow: Workflow, object_info: ObjectInfo) -> Prompt:
    """The API prompt of a workflow.

    Args:
        workflow: UI format 0.4, as saved, exported or made by `app.graph.serialize()`.
        object_info: the server's answer to GET /object_info.

    Raises:
        WorkflowError: it is no such workflow, or has nodes that the server does not know.
    """
    _check_format(workflow)
    graph = _Graph(workflow)
    for node in graph.nodes.values():
        if node.get("mode", 0) == BYPASSED and node["type"] in object_info:
            graph.nodes[node["id"]] = {**node, "inputs": _sockets(node, object_info)}
    prompt: Prompt = {}
    for node in graph.nodes.values():
        if node["type"] in VIRTUAL or node.get("mode", 0) in (MUTED, BYPASSED):
            continue
        inputs = {w.name: {"__value__": w.value} if isinstance(w.value, list) else w.value
                  for w in _widgets(node, object_info) if w.sent}
        for slot, socket in enumerate(node.get("inputs") or []):
            primitive = graph.primitive_value(socket)
            if primitive is not None:
                inputs[socket["name"]] = primitive
            source = graph.source_of_input(node, slot)
            if source is not None:
                inputs[socket["name"]] = list(source)
        prompt[str(node["id"])] = {"inputs": inputs, "class_type": node["type"]}
    for entry in prompt.values():  # links to nodes that are muted, or behind muted ones
        entry["inputs"] = {name: value for name, value in entry["inputs"].items()
                           if not _is_link(value) or value[0] in prompt}
    return prompt


def set_widget(workflow: Workflow, node: str, widget: str, value: Any, object_info: ObjectInfo) -> None:
    """Set a widget on all nodes of a type, or of a title, in place.

    A sub-widget of a dynamic combo is called `rows.strength_1`; set the combo itself first.

    Raises:
        WorkflowError: no such node, or no such widget on it.
    """
    for found in _find(workflow, node):
        values = {w.name: w.value for w in _widgets(found, object_info)}
        if widget not in values:
            raise WorkflowError(f"{node} has no widget {widget!r}; it has {', '.join(values) or 'none'}")
        values[widget] = value
        inputs = _inputs(object_info[found["type"]]["input"], object_info[found["type"]].get("input_order"))
        found["widgets_values"] = [w.value for w in _assign(inputs, "", values.get)]


def bypass(workflow: Workflow, nodes: Collection[str]) -> None:
    """Bypass all nodes of these types or titles, in place: what comes in goes out, by type.

    Raises:
        WorkflowError: no such node.
    """
    for name in nodes:
        for node in _find(workflow, name):
            node["mode"] = BYPASSED


def _check_format(workflow: Workflow) -> None:
    if not isinstance(workflow.get("nodes"), list) or not isinstance(workflow.get("links"), list):
        raise WorkflowError("this is no workflow in UI format: it has no lists 'nodes' and 'links'")
    if workflow.get("version") != 0.4:
        raise WorkflowError(f"only workflows of version 0.4 are understood, this one is {workflow.get('version')!r}")
    if (workflow.get("definitions") or {}).get("subgraphs"):
        raise WorkflowError("the workflow has subgraphs; unpack them in ComfyUI first")


def _find(workflow: Workflow, name: str) -> list[Node]:
    found = [node for node in workflow["nodes"] if name in (node["type"], node.get("title"))]
    if not found:
        raise WorkflowError(f"no node of type or title {name!r} in the workflow")
    return found


class _Widget(NamedTuple):
    name: str
    value: Any
    sent: bool = True  #: whether the server gets to see it


def _widgets(node: Node, object_info: ObjectInfo) -> list[_Widget]:
    """A node's widgets in the page's order with their saved values."""
    info = object_info.get(node["type"])
    if info is None:
        raise WorkflowError(f"the server has no node {node['type']} (node {node['id']} of the workflow)")
    saved = node.get("widgets_values") or []
    if isinstance(saved, dict):
        raise WorkflowError(f"node {node['id']} ({node['type']}) keeps its widgets by name; only lists are understood")
    values = iter(saved)
    return list(_assign(_inputs(info["input"], info.get("input_order")), "", lambda _, default: next(values, default)))


def _inputs(groups: dict[str, Any], order: dict[str, list[str]] | None = None) -> list[tuple[str, list[Any]]]:
    """Names and specifications in the order of the page's widgets: the required ones first."""
    inputs = []
    for group in ("required", "optional"):
        specs = groups.get(group) or {}
        inputs += [(name, specs[name]) for name in (order or {}).get(group, specs)]
        if group == "required":
            inputs += [("upload", ["IMAGEUPLOAD"]) for spec in specs.values() if any(map(_options(spec).get, UPLOADS))]
    return inputs


def _assign(
    inputs: list[tuple[str, list[Any]]], prefix: str, value_of: Callable[[str, Any], Any]
) -> Iterator[_Widget]:
    """The widgets among some inputs. `value_of` is asked for name and default, in the page's order."""
    for name, spec in inputs:
        kind, options, full = spec[0], _options(spec), prefix + name
        if kind == "IMAGEUPLOAD":
            yield _Widget(full, value_of(full, "image"), sent=False)
        elif kind == DYNAMIC_COMBO:
            choices = {option["key"]: option["inputs"] for option in options["options"]}
            chosen = value_of(full, options.get("default", next(iter(choices))))
            yield _Widget(full, chosen)
            yield from _assign(_inputs(choices.get(chosen, {})), f"{full}.", value_of)
        elif _is_widget(kind, options):
            yield _Widget(full, value_of(full, _default(kind, options)))
            for control, default in _controls(name, kind, options):
                yield _Widget(control, value_of(control, default), sent=False)


def _options(spec: list[Any]) -> dict[str, Any]:
    return spec[1] if len(spec) > 1 and isinstance(spec[1], dict) else {}


def _is_widget(kind: Any, options: dict[str, Any]) -> bool:
    return not options.get("forceInput") and (isinstance(kind, list) or options.get("widgetType", kind) in WIDGET_TYPES)


def _default(kind: Any, options: dict[str, Any]) -> Any:
    if "default" in options:
        return options["default"]
    if isinstance(kind, list) or kind == "COMBO":
        choices = kind if isinstance(kind, list) else options.get("options", [])
        return choices[0] if choices else None
    return {"INT": 0, "FLOAT": 0.0, "BOOLEAN": False}.get(kind, "")


def _controls(name: str, kind: Any, options: dict[str, Any]) -> list[tuple[str, str]]:
    """The widgets that follow and change this one after a run, with their defaults: a mode, and for combos a filter."""
    if not options.get("control_after_generate", kind == "INT" and name in SEEDS):
        return []
    controls = [("control_after_generate", "randomize"), ("control_filter_list", "")]
    return controls if isinstance(kind, list) or kind == "COMBO" else controls[:1]


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _fits(one: Any, other: Any) -> bool:
    """Return whether LiteGraph lets two types be connected."""
    if one in ("", "*", 0, None) or other in ("", "*", 0, None):
        return True
    return not set(str(one).lower().split(",")).isdisjoint(str(other).lower().split(","))


class _Graph:
    """The links of a workflow, followed as the page does it."""

    def __init__(self, workflow: Workflow) -> None:
        self.nodes: dict[int, Node] = {node["id"]: node for node in workflow["nodes"]}
        self.links: dict[int, Source] = {link[0]: (link[1], link[2]) for link in workflow["links"]}

    def source_of_input(self, node: Node, slot: int, kind: Any = None, seen: frozenset[Any] = frozenset()
                        ) -> Source | None:
        """The real node and output that feed an input, or None when nothing does in the end."""
        if (node["id"], slot) in seen:
            raise WorkflowError(f"the links into node {node['id']} ({node['type']}) run in a circle")
        socket = node["inputs"][slot]
        if socket.get("link") is None:
            return None
        if socket["link"] not in self.links:
            raise WorkflowError(f"input {socket['name']} of node {node['id']} has a link that does not exist")
        origin, output = self.links[socket["link"]]
        return self._source_of_output(
            self.nodes[origin], output, socket["type"] if kind is None else kind, seen | {(node["id"], slot)})

    def primitive_value(self, socket: dict[str, Any]) -> Any:
        """Return what a PrimitiveNode puts into the widget that it is linked to."""
        origin = self.nodes.get(self.links.get(socket.get("link"), (None, 0))[0])
        if origin is None or origin["type"] != "PrimitiveNode" or origin.get("mode", 0) == MUTED:
            return None
        return next(iter(origin.get("widgets_values") or []), None)

    def _source_of_output(self, node: Node, output: int, kind: Any, seen: frozenset[Any]) -> Source | None:
        mode = node.get("mode", 0)
        if mode == MUTED:
            return None
        if mode == BYPASSED:
            slot = _bypass_slot(node, output, kind)
            return None if slot is None else self.source_of_input(node, slot, None, seen)
        if node["type"] not in VIRTUAL:
            return str(node["id"]), output
        if output < len(node.get("inputs") or []):
            return self.source_of_input(node, output, kind, seen)
        return None


def _sockets(node: Node, object_info: ObjectInfo) -> list[dict[str, Any]]:
    """A node's inputs with those of its widgets, which the page adds where a file has none."""
    listed = node.get("inputs") or []
    names = {socket["name"] for socket in listed}
    groups = object_info[node["type"]]["input"]
    kinds = {name: spec[0] for group in ("required", "optional") for name, spec in groups.get(group, {}).items()}
    more = [w.name for w in _widgets(node, object_info) if w.sent and w.name not in names]
    return [*listed, *({"name": name, "type": str(kinds.get(name, "COMBO")), "link": None} for name in more)]


def _bypass_slot(node: Node, output: int, kind: Any) -> int | None:
    """Return the input that a bypassed node passes on: the one beside the output if it fits, or the first that fits."""
    inputs = node.get("inputs") or []
    made = node["outputs"][output]["type"]
    if kind in ("*", ""):
        return (output if output < len(inputs) else 0) if inputs else None
    if output < len(inputs) and _fits(inputs[output]["type"], made) and _fits(inputs[output]["type"], kind):
        return output
    exact = (slot for slot, socket in enumerate(inputs) if socket["type"] == kind)
    near = (slot for slot, socket in enumerate(inputs) if _fits(socket["type"], made) and _fits(socket["type"], kind))
    return next(exact, next(near, None))
