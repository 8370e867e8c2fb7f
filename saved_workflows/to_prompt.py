"""API prompts: made of saved workflows (UI format 0.4) as ComfyUI's page does, and rewired as workflows are.

Not covered: random choices such as {a|b} and %replacements% in texts (left as they are), and widgets that other packs'
JavaScript makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from .graph import (
    BYPASSED,
    GET,
    INPUT_NODE,
    MUTED,
    OUTPUT_NODE,
    REROUTES,
    SET,
    Graph,
    Link,
    Workflow,
    WorkflowError,
    as_workflow_error,
    check_format,
    definitions,
    name_of,
)
from .node_data import Data, Node, bypass_slot, kind_of

T = TypeVar("T")
Prompt = dict[str, dict[str, Any]]
ObjectInfo = dict[str, Any]
Source = tuple[str, int]

#: Nodes that live in the page only.
VIRTUAL = ("Note", "MarkdownNote", "PrimitiveNode", SET, GET, *REROUTES)
_RGTHREE = re.compile(r"(Fast|Label|Bookmark|Node Collector|Mute|Random Unmuter)\b.*\(rgthree\)")
WIDGET_TYPES = ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO", "COLOR")
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
SEEDS = ("seed", "noise_seed")
UPLOADS = ("image_upload", "video_upload", "animated_image_upload")


@as_workflow_error()
def to_prompt(workflow: Data, object_info: ObjectInfo) -> Prompt:
    """Return the API prompt of a workflow.

    Args:
        workflow: UI format 0.4, as saved, exported or made by `app.graph.serialize()`.
        object_info: the server's answer to GET /object_info.

    Raises:
        WorkflowError: it has another format, is damaged, or has nodes that the server does not know.
    """
    check_format(workflow)
    graph = _Flat(workflow)
    for node in graph.nodes.values():
        if node.get("mode", 0) == BYPASSED and node["type"] in object_info:
            graph.nodes[node["id"]] = {**node, "inputs": _sockets(node, object_info)}
    prompt: Prompt = {}
    for node in graph.nodes.values():
        if _is_virtual(node) or node.get("mode", 0) in (MUTED, BYPASSED):
            continue
        inputs = {w.name: {"__value__": w.value} if isinstance(w.value, list) else w.value
                  for w in widgets_of(node, object_info) if w.sent}
        for slot, socket in enumerate(node.get("inputs") or []):
            primitive = graph.primitive_value(socket)
            if primitive is not None:
                inputs[socket["name"]] = primitive
            source = graph.source_of_input(node, slot)
            if source is not None:
                inputs[socket["name"]] = list(source)
        prompt[node["id"]] = {"inputs": inputs, "class_type": node["type"]}
    for entry in prompt.values():  # links to nodes that are muted, or behind muted nodes
        entry["inputs"] = {name: value for name, value in entry["inputs"].items()
                           if not is_link(value) or value[0] in prompt}
    return prompt


class Widget(NamedTuple):
    """A widget with its saved value."""

    name: str
    value: Any
    sent: bool = True  #: False: the server does not get it


def widgets_of(node: Node, object_info: ObjectInfo) -> list[Widget]:
    """Return a node's widgets in the page's order with their saved values."""
    info = object_info.get(node["type"])
    if info is None:
        raise WorkflowError(f"the server has no node {node['type']} (node {node['id']} of the workflow)")
    saved = node.get("widgets_values") or []
    values = iter(saved)
    value_of = saved.get if isinstance(saved, dict) else lambda _, default: next(values, default)
    return list(assign(input_specs(info["input"], info.get("input_order")), "", value_of))


def input_specs(groups: dict[str, Any], order: dict[str, list[str]] | None = None) -> list[tuple[str, list[Any]]]:
    """Return names and specifications in the order of the page's widgets: required inputs first."""
    inputs = []
    for group in ("required", "optional"):
        specs = groups.get(group) or {}
        inputs += [(name, specs[name]) for name in (order or {}).get(group, specs)]
        if group == "required":
            inputs += [("upload", ["IMAGEUPLOAD"]) for spec in specs.values() if any(map(_options(spec).get, UPLOADS))]
    return inputs


def assign(
    inputs: list[tuple[str, list[Any]]], prefix: str, value_of: Callable[[str, Any], Any]
) -> Iterator[Widget]:
    """Yield the widgets among some inputs. `value_of` is asked for name and default, in the page's order."""
    for name, spec in inputs:
        kind, options, full = spec[0], _options(spec), prefix + name
        if kind == "IMAGEUPLOAD":
            yield Widget(full, value_of(full, "image"), sent=False)
        elif kind == DYNAMIC_COMBO:
            choices = {option["key"]: option["inputs"] for option in options["options"]}
            chosen = value_of(full, options.get("default", next(iter(choices))))
            yield Widget(full, chosen)
            yield from assign(input_specs(choices.get(chosen, {})), f"{full}.", value_of)
        elif _is_widget(kind, options):
            yield Widget(full, value_of(full, _default(kind, options)))
            for control, default in _controls(name, kind, options):
                yield Widget(control, value_of(control, default), sent=False)


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
    """Return the widgets that change a widget after a run, with defaults: a mode, and for combos a filter."""
    if not options.get("control_after_generate", kind == "INT" and name in SEEDS):
        return []
    controls = [("control_after_generate", "randomize"), ("control_filter_list", "")]
    return controls if isinstance(kind, list) or kind == "COMBO" else controls[:1]


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _is_virtual(node: Node) -> bool:
    return node["type"] in VIRTUAL or bool(_RGTHREE.match(node["type"]))


class _Flat:
    """Nodes and links of a workflow without its subgraphs; links are followed as on the page.

    A node in a subgraph has the id that prompts give it, as "2:5". Inputs and outputs of subgraphs become reroutes.
    """

    def __init__(self, workflow: Data) -> None:
        self.nodes: dict[str, Node] = {}
        self.links: dict[str, Source] = {}
        self._subgraphs = {inner["id"]: inner for inner in definitions(workflow)}
        self._add(workflow, "", {})

    def _add(self, graph: Data, prefix: str, outer: dict[Any, Any]) -> None:
        """Add a graph; ``outer`` has the inputs of the Set nodes around it by name."""
        def sockets(node: Node) -> list[dict[str, Any]]:
            return [{**socket, "link": None if (link := socket.get("link")) is None else f"{prefix}{link}"}
                    for socket in node.get("inputs") or []]
        used = {node["id"] for node in graph["nodes"] if self._opens(node)}
        for link in map(Link.of, graph.get("links") or []):
            origin, slot = f"{prefix}{link.origin}", link.slot
            if link.origin == INPUT_NODE or link.origin in used:
                origin = f"{prefix}in:{slot}" if link.origin == INPUT_NODE else f"{origin}:out:{slot}"
                slot = 0
            self.links[f"{prefix}{link.id}"] = origin, slot
        setters = outer | {name_of(node): sockets(node) for node in graph["nodes"] if node["type"] == SET}
        for node in graph["nodes"]:
            own, inputs = node["id"], sockets(node)
            if node["type"] == GET:
                node, inputs = {**node, "type": REROUTES[0]}, setters.get(name_of(node), [])
            node = {**node, "id": f"{prefix}{own}", "inputs": inputs}
            if own in used:
                self._open(node, setters)
            else:
                self.nodes[node["id"]] = node

    def _opens(self, node: Node) -> bool:
        return node["type"] in self._subgraphs and node.get("mode", 0) not in (MUTED, BYPASSED)

    def _open(self, use: Node, outer: dict[Any, Any]) -> None:
        """Add the inside of a subgraph where a node uses it. Its widgets' values enter as primitives."""
        inner, inside = self._subgraphs[use["type"]], f"{use['id']}:"
        shown = [socket["name"] for socket in use["inputs"] if socket.get("widget")]
        values = use.get("widgets_values") or []
        known = dict(zip(shown, values, strict=True)) if len(values) == len(shown) else {}
        for slot, socket in enumerate(inner.get("inputs") or []):
            name = socket["name"]
            given = next((fed for fed in use["inputs"] if fed["name"] == name), {**socket, "link": None})
            fixed = given["link"] is None and name in known
            self.nodes[f"{inside}in:{slot}"] = {
                "id": f"{inside}in:{slot}", "type": "PrimitiveNode" if fixed else REROUTES[0], "inputs": [given],
                "outputs": [socket], "widgets_values": [known.get(name)],
            }
        out = {link.target_slot: link for link in map(Link.of, inner.get("links") or []) if link.target == OUTPUT_NODE}
        for slot, socket in enumerate(inner.get("outputs") or []):
            link = f"{inside}{out[slot].id}" if slot in out else None
            node = {"id": f"{inside}out:{slot}", "type": REROUTES[0], "inputs": [{**socket, "link": link}]}
            self.nodes[node["id"]] = {**node, "outputs": [socket]}
        self._add(inner, inside, outer)

    def source_of_input(self, node: Node, slot: int, kind: Any = None, seen: frozenset[Any] = frozenset()
                        ) -> Source | None:
        """Return the real node and output that feed an input in the end, or None."""
        if (node["id"], slot) in seen:
            raise WorkflowError(f"the links into node {node['id']} ({node['type']}) run in a circle")
        socket = node["inputs"][slot]
        if socket.get("link") is None:
            return None
        if socket["link"] not in self.links:
            raise WorkflowError(f"input {socket['name']} of node {node['id']} has a link that does not exist")
        origin, output = self.links[socket["link"]]
        return self._source_of_output(
            self.nodes[origin], output, kind_of(socket) if kind is None else kind, seen | {(node["id"], slot)})

    def primitive_value(self, socket: dict[str, Any]) -> Any:
        """Return the value that a PrimitiveNode puts into its linked widget."""
        origin, seen = self._origin(socket), set()
        while origin is not None and origin["type"] in REROUTES and origin.get("inputs") and origin["id"] not in seen:
            seen.add(origin["id"])
            origin = self._origin(origin["inputs"][0])
        if origin is None or origin["type"] != "PrimitiveNode" or origin.get("mode", 0) == MUTED:
            return None
        return next(iter(origin.get("widgets_values") or []), None)

    def _origin(self, socket: dict[str, Any]) -> Node | None:
        return self.nodes.get(self.links.get(socket.get("link"), ("", 0))[0])

    def _source_of_output(self, node: Node, output: int, kind: Any, seen: frozenset[Any]) -> Source | None:
        mode = node.get("mode", 0)
        if mode == MUTED:
            return None
        if mode == BYPASSED:
            slot = bypass_slot(node, output, kind)
            return None if slot is None else self.source_of_input(node, slot, None, seen)
        if not _is_virtual(node):
            return node["id"], output
        if output < len(node.get("inputs") or []):
            return self.source_of_input(node, output, kind, seen)
        return None


def _sockets(node: Node, object_info: ObjectInfo) -> list[dict[str, Any]]:
    """Return a node's inputs with its widgets' inputs, which the page adds where a file lacks them."""
    listed = node.get("inputs") or []
    names = {socket["name"] for socket in listed}
    groups = object_info[node["type"]]["input"]
    kinds = {name: spec[0] for group in ("required", "optional") for name, spec in groups.get(group, {}).items()}
    more = [w.name for w in widgets_of(node, object_info) if w.sent and w.name not in names]
    return [*listed, *({"name": name, "type": str(kinds.get(name, "COMBO")), "link": None} for name in more)]


def is_prompt(data: Any) -> bool:
    """Tell whether data is a workflow in API format."""
    entries = list(data.values()) if isinstance(data, Mapping) else []
    return bool(entries) and all(isinstance(entry, Mapping) and isinstance(entry.get("class_type"), str)
                                 and isinstance(entry.get("inputs"), dict) for entry in entries)  # fmt: skip


@as_workflow_error()
def change_prompt(prompt: Prompt, object_info: ObjectInfo, how: Callable[[Workflow], T]) -> T:
    """Change an API prompt in place by a function for workflows, and return its result.

    Raises:
        WorkflowError: it has nodes that ComfyUI does not know, or is damaged.
    """
    workflow = Workflow(_drawn(prompt, object_info))
    answer = how(workflow)
    _write_back(workflow.root, prompt, object_info)
    return answer


def _write_back(graph: Graph, prompt: Prompt, object_info: ObjectInfo) -> None:
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
