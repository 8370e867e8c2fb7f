"""A workflow in UI format 0.4 that can be followed and rewired; what changes is the file's own data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Data = dict[str, Any]
Node = dict[str, Any]

MUTED, BYPASSED = 2, 4
INPUT_NODE, OUTPUT_NODE = -10, -20
"""Ids that stand for the inputs and outputs of a subgraph, in the links inside it."""
REROUTES = ("Reroute", "Reroute (rgthree)")
SET, GET = "SetNode", "GetNode"
"""Nodes of KJNodes: what goes into one comes out of those of the other that have the same name."""


class WorkflowError(ValueError):
    """The workflow cannot be used as it is, or has not what was asked for; the text says what and where."""


@dataclass
class Link:
    """A wire. ``kept`` has what the file says of it beside its ends."""

    id: int
    origin: Any
    slot: int
    target: Any
    target_slot: int
    type: Any
    kept: Data | None

    @classmethod
    def of(cls, saved: Any) -> Link:
        """Read a link: a list in the outermost graph, an object in a subgraph."""
        if isinstance(saved, dict):
            ends = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
            return cls(*(saved[name] for name in ends), kept=saved)
        return cls(*saved[:6], kept=None)

    def saved(self) -> Any:
        """Return it as files have it."""
        ends = {"id": self.id, "origin_id": self.origin, "origin_slot": self.slot,
                "target_id": self.target, "target_slot": self.target_slot, "type": self.type}  # fmt: skip
        return list(ends.values()) if self.kept is None else self.kept | ends


class Port(NamedTuple):
    """Origin that a link can have: a node's output, or an input of the subgraph that holds the link."""

    graph: Graph
    node: Any
    slot: int


class Graph:
    """The outermost graph of a workflow, or the inside of a subgraph."""

    def __init__(self, data: Data, inside: bool) -> None:
        self.data, self.inside = data, inside
        self.nodes: dict[Any, Node] = {node["id"]: node for node in data["nodes"]}
        ends = {socket["link"]: (node["id"], i) for node in data["nodes"]
                for i, socket in enumerate(node.get("inputs") or []) if socket.get("link") is not None}  # fmt: skip
        whole = (self._whole(Link.of(saved), ends) for saved in data.get("links") or [] if saved)
        self.links = {link.id: link for link in whole if link is not None}
        for node in self.nodes.values():
            for name in ("pos", "size"):  # old files have objects
                pair = node.get(name) or [0, 0]
                node[name] = [float(n) for n in (pair.values() if isinstance(pair, dict) else pair)][:2]

    def save(self) -> None:
        """Write nodes and links back into the file's data."""
        self.data["nodes"] = list(self.nodes.values())
        self.data["links"] = [link.saved() for link in self.links.values()]

    def links_of(self, node: Any, slot: int) -> list[Link]:
        """Return the links that begin at an output."""
        return [link for link in self.links.values() if (link.origin, link.slot) == (node, slot)]

    def link_into(self, node: Node, name: str) -> Link | None:
        """Return the link into an input."""
        return next((self.links.get(one.get("link")) for one in node.get("inputs") or [] if one["name"] == name), None)

    def connect(self, link: Link) -> None:
        """Add a link into a node's input, or give one that is there another origin."""
        before = self.links.get(link.id, link)
        self.links[link.id] = link
        self._tell_origins(before, link)
        if link.target in self.nodes:
            self.nodes[link.target]["inputs"][link.target_slot]["link"] = link.id

    def cut(self, link: Link) -> None:
        """Take a link away."""
        del self.links[link.id]
        self._tell_origins(link)
        if link.target in self.nodes:
            self.nodes[link.target]["inputs"][link.target_slot]["link"] = None
        else:
            self.data["outputs"][link.target_slot]["linkIds"].remove(link.id)

    def depends_on(self, node: Any, other: Any) -> bool:
        """Tell whether a node needs another one, or is it."""
        seen, queue = {node}, [node]
        for current in queue:
            found = self.nodes.get(current)
            origins = {link.origin for link in self.links.values() if link.target == current}
            if found is not None and found["type"] == GET:
                origins |= {one["id"] for one in self.nodes.values()
                            if one["type"] == SET and name_of(one) == name_of(found)}  # fmt: skip
            queue += origins - seen
            seen |= origins
        return other in seen

    def _tell_origins(self, *links: Link) -> None:
        """Let the outputs, or inputs of the subgraph, that links begin at list what begins there."""
        for link in links:
            node, ids = self.nodes.get(link.origin), [one.id for one in self.links_of(link.origin, link.slot)]
            holder = node["outputs"][link.slot] if node else self.data["inputs"][link.slot]
            holder["links" if node else "linkIds"] = ids

    def _whole(self, link: Link, ends: dict[int, tuple[Any, int]]) -> Link | None:
        """Return a link with the end that the inputs tell, as the page does it; None where an end is missing."""
        into = (link.target, link.target_slot) if link.target == OUTPUT_NODE else ends.get(link.id)
        origin = self.nodes.get(link.origin, {"outputs": self.data.get("inputs")} if link.origin == INPUT_NODE else {})
        if into is None or link.slot >= len(origin.get("outputs") or []):
            return None
        return replace(link, target=into[0], target_slot=into[1])


class Workflow:
    """All graphs of a saved workflow, each subgraph once however often it is used."""

    def __init__(self, data: Data) -> None:
        check_format(data)
        self.data, self.root = data, Graph(data, inside=False)
        self.subgraphs = {one["id"]: Graph(one, inside=True) for one in definitions(data)}
        self.uses: dict[Graph, list[tuple[Graph, Node]]] = {self.root: []}
        """Graphs that run -> the nodes that use them. ``subgraphs`` has those too that run nowhere."""
        queue = [self.root]
        for graph in queue:
            for node in graph.nodes.values():
                inner = self.subgraphs.get(node["type"])
                if inner is None or node.get("mode", 0) in (MUTED, BYPASSED):
                    continue
                if inner not in self.uses:
                    queue.append(inner)
                self.uses.setdefault(inner, []).append((graph, node))

    def save(self) -> None:
        """Write what has changed into the file's data."""
        for graph in (self.root, *self.subgraphs.values()):
            graph.save()

    def next_id(self, of: str) -> int:
        """Return an id that no node, or no link, of any graph has; ``of`` is ``"node"`` or ``"link"``."""
        every = [self.root, *self.subgraphs.values()]
        kept = [self.data.get(f"last_{of}_id") or 0, *(_state(one).get(f"last{of.title()}Id", 0) for one in every)]
        used = [int(i) for one in every for i in getattr(one, f"{of}s") if str(i).isdigit()]
        found = max([*kept, *used]) + 1
        self.data[f"last_{of}_id"] = found
        for one in every:
            if _state(one):
                _state(one)[f"last{of.title()}Id"] = found
        return found

    def is_real(self, node: Node) -> bool:
        """Tell whether a node runs as itself."""
        plain = node["type"] not in (*REROUTES, SET, GET, "PrimitiveNode", "Note", "MarkdownNote")
        return plain and node.get("mode", 0) not in (MUTED, BYPASSED) and node["type"] not in self.subgraphs

    def reader(self, graph: Graph, link: Link) -> Node | None:
        """Return the real node that a link leads into, or one of ours, which may be switched off."""
        node = graph.nodes.get(link.target)
        return node if node is not None and (is_ours(node) or self.is_real(node)) else None

    def beyond(self, graph: Graph, link: Link, kind: str) -> Iterator[Port]:
        """Yield where what comes by a link goes on: behind what hands it on, and nodes that give the same kind."""
        node = graph.nodes.get(link.target)
        if node is None:  # an output of the subgraph
            yield from (Port(outer, use["id"], link.target_slot) for outer, use in self.uses.get(graph, ()))
        elif node.get("mode", 0) == BYPASSED:
            yield from (Port(graph, node["id"], i) for i, output in enumerate(node.get("outputs") or [])
                        if fits(output["type"], kind) and bypass_slot(node, i, kind) == link.target_slot)  # fmt: skip
        elif node.get("mode", 0) == MUTED:
            return
        elif node["type"] in self.subgraphs:
            inner = self.subgraphs[node["type"]]
            yield Port(inner, INPUT_NODE, _inner_slot(inner.data, node, link.target_slot))
        elif node["type"] in (SET, GET, *REROUTES):
            yield Port(graph, node["id"], 0)
            if node["type"] == SET:
                yield from (Port(graph, get["id"], 0) for get in graph.nodes.values() if get["type"] == GET
                            and get.get("mode", 0) != MUTED and name_of(get) == name_of(node))  # fmt: skip
        else:
            into = node["inputs"][link.target_slot]["type"]
            made = (kind, "*") if into == "*" else (kind,)
            yield from (Port(graph, node["id"], i) for i, output in enumerate(node.get("outputs") or [])
                        if output["type"] in made)  # fmt: skip

    def behind(self, graph: Graph, link: Link, kind: str) -> list[Node]:
        """Return all real nodes that a link leads to, in the end."""
        found, seen, queue = [], set(), [(graph, link)]
        for current, wire in queue:
            node = self.reader(current, wire)
            if node is not None:
                found.append(node)
            if node is not None and is_ours(node):
                continue
            for port in self.beyond(current, wire, kind):
                if port not in seen:
                    seen.add(port)
                    queue += [(port.graph, one) for one in port.graph.links_of(port.node, port.slot)]
        return found


def change(data: Data, how: Callable[[Workflow], T]) -> T:
    """Change a workflow in place, and return what was done.

    Raises:
        WorkflowError: it is none, or is damaged.
    """
    with damage_told():
        return how(Workflow(data))


@contextmanager
def damage_told() -> Iterator[None]:
    """Raise what comes of a workflow with other values than ComfyUI saves as ``WorkflowError``."""
    try:
        yield
    except WorkflowError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise WorkflowError(f"it is damaged ({type(error).__name__}: {str(error)[:200]})") from error


def check_format(data: Data) -> None:
    """Refuse what is no workflow in UI format 0.4."""
    if not isinstance(data.get("nodes"), list) or not isinstance(data.get("links"), list):
        raise WorkflowError("this is no workflow in UI format: it has no lists 'nodes' and 'links'")
    if data.get("version") != 0.4:
        raise WorkflowError(f"only workflows of version 0.4 are understood, this one is {data.get('version')!r}")


def definitions(data: Data) -> Iterator[Data]:
    """Yield the definitions of all subgraphs, those inside others too."""
    for one in (data.get("definitions") or {}).get("subgraphs") or []:
        yield one
        yield from definitions(one)


def is_ours(node: Node) -> bool:
    """Tell whether a node is one of this pack's."""
    return node["type"].startswith("TRT")


def name_of(node: Node) -> Any:
    """Return the name that Set and Get nodes share."""
    values = node.get("widgets_values")
    return values[0] if isinstance(values, list) and values else None


def _inner_slot(inner: Data, use: Node, slot: int) -> int:
    """Return the input of a subgraph that an input of its node stands for."""
    name = use["inputs"][slot]["name"]
    return next((i for i, one in enumerate(inner.get("inputs") or []) if one["name"] == name), slot)


def _state(graph: Graph) -> Data:
    return graph.data.get("state") or {}


def fits(one: Any, other: Any) -> bool:
    """Return whether LiteGraph lets two types be connected."""
    if one in ("", "*", 0, None) or other in ("", "*", 0, None):
        return True
    return not set(str(one).lower().split(",")).isdisjoint(str(other).lower().split(","))


def bypass_slot(node: Node, output: int, kind: Any) -> int | None:
    """Return the input that a bypassed node passes on: the one beside the output if it fits, or the first that fits."""
    inputs = node.get("inputs") or []
    made = node["outputs"][output]["type"]
    if kind in ("*", ""):
        return (output if output < len(inputs) else 0) if inputs else None
    if output < len(inputs) and fits(inputs[output]["type"], made) and fits(inputs[output]["type"], kind):
        return output
    exact = (slot for slot, socket in enumerate(inputs) if socket["type"] == kind)
    near = (slot for slot, socket in enumerate(inputs) if fits(socket["type"], made) and fits(socket["type"], kind))
    return next(exact, next(near, None))
