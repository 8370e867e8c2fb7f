"""A workflow in UI format 0.4 that can be followed and rewired; changes go into the file's own data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from .node_data import (
    INPUT_NODE,
    OUTPUT_NODE,
    Data,
    Node,
    bypass_slot,
    feeds,
    fits,
    free,
    is_understood,
    kind_of,
    priority,
)

T = TypeVar("T")

MUTED, BYPASSED = 2, 4
REROUTES = ("Reroute", "Reroute (rgthree)")
SET, GET = "SetNode", "GetNode"
"""Nodes of KJNodes: values of a Set come out of the Gets of the same name."""


EVERYWHERE = "Everywhere"
"""Part of the types of nodes that the page wires to all free inputs of a type as it queues (cg-use-everywhere)."""


class WorkflowError(ValueError):
    """The workflow is unusable, or lacks a requested part; the text says what and where."""


@dataclass
class Link:
    """A wire. ``kept`` has the file's other data on it."""

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
        once = {repr(saved): saved for saved in data.get("links") or [] if saved}
        saved_links = [(saved, Link.of(saved)) for saved in once.values()]
        self.times = {"node": Counter(node["id"] for node in data["nodes"]),
                      "link": Counter(link.id for _, link in saved_links)}  # fmt: skip
        """Number of times that the file has each id. Nodes and links with a shared id are never changed."""
        self.nodes: dict[Any, Node] = {
            node["id"] if self.times["node"][node["id"]] == 1 else ("twice", i): node
            for i, node in enumerate(data["nodes"])
        }
        self.everywhere = [node for node in data["nodes"] if EVERYWHERE in node["type"]
                           and node.get("mode", 0) not in (MUTED, BYPASSED)]  # fmt: skip
        ends: dict[Any, list[tuple[Any, int]]] = defaultdict(list)
        for node in data["nodes"]:
            for i, socket in enumerate(node.get("inputs") or []):
                if socket.get("link") is not None:
                    ends[socket["link"]].append((node["id"], i))
        self.links: dict[Any, Link] = {}
        self._from: dict[Any, dict[int, dict[Any, Link]]] = defaultdict(lambda: defaultdict(dict))
        self._into: dict[Any, dict[Any, Link]] = defaultdict(dict)
        self.left: list[Any] = []
        """Links that cannot be followed, as the file has them: they stay as they are."""
        self.lost: dict[Any, set[Any]] = {}
        """Ids of such links that inputs name, so that a page may follow them -> the nodes at their ends."""
        for saved, link in saved_links:
            whole = self._whole(link, ends[link.id]) if self.times["link"][link.id] == 1 else None
            if whole is not None:
                self._keep(whole)
                continue
            self.left.append(saved)
            if ends[link.id]:
                self.lost.setdefault(link.id, set()).update([link.origin], (node for node, _ in ends[link.id]))
        for node in self.nodes.values():
            for name in ("pos", "size"):  # old files have objects
                pair = node.get(name) or [0, 0]
                node[name] = [float(n) for n in (pair.values() if isinstance(pair, dict) else pair)][:2]

    def save(self) -> None:
        """Write nodes and links back into the file's data."""
        self.data["nodes"] = list(self.nodes.values())
        self.data["links"] = [*(link.saved() for link in self.links.values()), *self.left]

    def links_of(self, node: Any, slot: int) -> list[Link]:
        """Return the links that begin at an output."""
        return list(self._from[node][slot].values())

    def links_into(self, node: Any) -> list[Link]:
        """Return the links that end at a node."""
        return list(self._into[node].values())

    def links_at(self, node: Any) -> list[Link]:
        """Return the links into a node, and out of it."""
        return [*self.links_into(node), *(link for slot in self._from[node].values() for link in slot.values())]

    def made(self, node: Node) -> dict[int, Any]:
        """Return the types of a node's outputs by slot; links give types of outputs that the file does not list."""
        kinds = {slot: link.type for slot, links in self._from[node["id"]].items() for link in links.values()}
        return kinds | {slot: kind_of(output) for slot, output in enumerate(node.get("outputs") or [])}

    def link_into(self, node: Node, name: str) -> Link | None:
        """Return the link into an input."""
        found = (socket.get("link") for socket in node.get("inputs") or [] if socket.get("name") == name)
        return self.links.get(next(found, None))

    def loses(self, node: Node) -> bool:
        """Tell whether a node shares its id, or has a link that cannot be followed: it must not be removed."""
        return self.nodes.get(node["id"]) is not node or any(node["id"] in ends for ends in self.lost.values())

    def connect(self, link: Link) -> None:
        """Add a link into a node's input, or change the origin of its link."""
        before = self.links.get(link.id, link)
        self._forget(before)
        self._keep(link)
        self._tell_origins(before, link)
        if link.target in self.nodes:
            self.nodes[link.target]["inputs"][link.target_slot]["link"] = link.id

    def cut(self, link: Link) -> None:
        """Take a link away."""
        self._forget(link)
        self._tell_origins(link)
        del self.links[link.id]
        if link.target in self.nodes:
            self.nodes[link.target]["inputs"][link.target_slot]["link"] = None
        else:
            self.data["outputs"][link.target_slot]["linkIds"].remove(link.id)

    def depends_on(self, node: Any, other: Any) -> bool:
        """Tell whether a node depends on another node, or is that node."""
        return node in self.needing(other)

    def needing(self, node: Any) -> list[Any]:
        """Return a node and all that needs it in this graph, the nearest first."""
        seen = {node: None}
        queue = [node]
        for current in queue:
            more = [reader for reader in self.next(current) if reader not in seen and reader != OUTPUT_NODE]
            seen |= dict.fromkeys(more)
            queue += more
        return queue

    def next(self, node: Any) -> dict[Any, None]:
        """Return the readers of a node's outputs, by wire or by name."""
        found = self.nodes.get(node, {})
        more = [link.target for links in self._from[node].values() for link in links.values()]
        if found.get("type") == SET:
            more += [get["id"] for get in self.named(GET, name_of(found))]
        if found in self.everywhere:
            more += [key for key, reader in self.nodes.items() if node in self.fed(reader)]
        return dict.fromkeys(more)

    def named(self, kind: str, name: Any) -> list[Node]:
        """Return the Set or Get nodes of a name."""
        return [node for node in self.nodes.values() if node["type"] == kind and name_of(node) == name]

    def spread(self, link: Link, kind: Any) -> list[Link]:
        """Return the wires that the page makes from a link into an Everywhere node; the file has none of them.

        Empty where the node has a filter that is not understood: nodes that it feeds stay unchanged.
        """
        sender = next((node for node in self.everywhere if node["id"] == link.target), None)
        if sender is None or not is_understood(sender):
            return []
        return [replace(link, target=key, target_slot=slot) for key, node in self.nodes.items()
                if not is_ours(node) and node not in self.everywhere
                for slot in free(node, kind) if sender in self._senders(node, slot)]  # fmt: skip

    def fed(self, node: Node, kind: Any = None) -> set[Any]:
        """Return the Everywhere nodes that feed, or may feed, free inputs of a node, optionally of a type."""
        links = [link for sender in self.everywhere for link in self.links_into(sender["id"])]
        types = {link.type for link in links if kind in (None, link.type)}
        return {sender["id"] for of in types for slot in free(node, of) for sender in self._senders(node, slot)}

    def _senders(self, node: Node, slot: int) -> list[Node]:
        """Return the Everywhere nodes of the highest priority that feed a free input, and nodes not understood."""
        socket, groups = node["inputs"][slot], self.data.get("groups") or []
        kind = kind_of(socket)
        found = [sender for sender in self.everywhere
                 if any(link.type == kind for link in self.links_into(sender["id"]))]  # fmt: skip
        clear = [sender for sender in found if is_understood(sender) and feeds(sender, node, socket, groups)]
        best = max(map(priority, clear), default=0)
        first = [sender for sender in clear if priority(sender) == best]
        return [sender for sender in found if not is_understood(sender) or sender in first]

    def _keep(self, link: Link) -> None:
        self.links[link.id] = self._from[link.origin][link.slot][link.id] = self._into[link.target][link.id] = link

    def _forget(self, link: Link) -> None:
        self._from[link.origin][link.slot].pop(link.id, None)
        self._into[link.target].pop(link.id, None)

    def _tell_origins(self, *links: Link) -> None:
        """Update the lists of links at the outputs, or subgraph inputs, where links begin."""
        for link in links:
            node, ids = self.nodes.get(link.origin), self._from[link.origin][link.slot]
            holders, name = (node.get("outputs"), "links") if node else (self.data["inputs"], "linkIds")
            for holder in (holders or [])[link.slot:link.slot + 1]:  # empty where the file lists no such output
                kept = [known for known in holder.get(name) or [] if known in ids or known not in self.links]
                holder[name] = [*kept, *(new for new in ids if new not in kept)]

    def _whole(self, link: Link, ends: list[tuple[Any, int]]) -> Link | None:
        """Return a link with its end from the inputs' data, as on the page; None where an end is not certain."""
        target, slot = (link.target, link.target_slot) if link.target == OUTPUT_NODE else (ends or [(None, 0)])[0]
        begins = link.slot >= 0 and (link.origin in self.nodes or link.origin == INPUT_NODE
                                     and link.slot < len(self.data.get("inputs") or []))  # fmt: skip
        ended = target in self.nodes and len(ends) == 1 or target == OUTPUT_NODE
        return replace(link, target=target, target_slot=slot) if begins and ended else None


class Workflow:
    """All graphs of a saved workflow, each subgraph once however often it is used."""

    def __init__(self, data: Data) -> None:
        check_format(data)
        self.data, self.root = data, Graph(data, inside=False)
        self.subgraphs = {inner["id"]: Graph(inner, inside=True) for inner in definitions(data)}
        self.uses: dict[Graph, list[tuple[Graph, Node]]] = {self.root: []}
        """Graphs that run -> the nodes that use them. ``subgraphs`` also has unused graphs."""
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
        """Write the changes into the file's data."""
        for graph in (self.root, *self.subgraphs.values()):
            graph.save()

    def next_id(self, of: str) -> int:
        """Return an id that no node, or no link, of any graph has; ``of`` is ``"node"`` or ``"link"``."""
        every = [self.root, *self.subgraphs.values()]
        kept = [self.data.get(f"last_{of}_id") or 0, *(_state(graph).get(f"last{of.title()}Id", 0) for graph in every)]
        used = [int(i) for graph in every for i in graph.times[of] if str(i).isdigit()]
        found = max([*kept, *used]) + 1
        self.data[f"last_{of}_id"] = found
        for graph in every:
            if _state(graph):
                _state(graph)[f"last{of.title()}Id"] = found
        return found

    def left_alone(self) -> str:
        """Return a sentence on links left alone, because their ends are not clear; empty without such links."""
        every = (self.root, *self.subgraphs.values())
        nodes = {node for graph in every for node, times in graph.times["node"].items() if times > 1}
        unclear = {node["id"] for graph in every for node in graph.everywhere if not is_understood(node)}
        found = {"links": {link for graph in every for link in graph.lost}, "nodes": nodes, "filters of nodes": unclear}
        words = [f"{name} {', '.join(sorted(map(str, ids)))}" for name, ids in found.items() if ids]
        return f"Left as they were, because it is not clear where they lead: {' and '.join(words)}." if words else ""

    def is_real(self, node: Node) -> bool:
        """Tell whether a node runs as itself."""
        plain = node["type"] not in (*REROUTES, SET, GET, "PrimitiveNode", "Note", "MarkdownNote")
        return plain and node.get("mode", 0) not in (MUTED, BYPASSED) and node["type"] not in self.subgraphs

    def reader(self, graph: Graph, link: Link) -> Node | None:
        """Return the real node that a link leads into, or our node, which may be switched off."""
        node = graph.nodes.get(link.target)
        return node if node is not None and (is_ours(node) or self.is_real(node)) else None

    def beyond(self, graph: Graph, link: Link, kind: str) -> Iterator[Port]:
        """Yield the ports where a link's values go on: behind nodes that pass them on or output the kind."""
        node = graph.nodes.get(link.target)
        for wire in graph.spread(link, kind):
            yield from self.beyond(graph, wire, kind)
        if node is None:  # an output of the subgraph
            yield from (Port(outer, use["id"], link.target_slot) for outer, use in self.uses.get(graph, ()))
        elif node.get("mode", 0) == BYPASSED:
            yield from (Port(graph, node["id"], i) for i, made in graph.made(node).items()
                        if fits(made, kind) and bypass_slot(node, i, kind) == link.target_slot)
        elif node.get("mode", 0) == MUTED:
            return
        elif node["type"] in self.subgraphs:
            inner = self.subgraphs[node["type"]]
            yield Port(inner, INPUT_NODE, _inner_slot(inner.data, node, link.target_slot))
        elif node["type"] in (SET, GET, *REROUTES):
            yield Port(graph, node["id"], 0)
            if node["type"] == SET:
                name = name_of(node)  # a Set also serves Gets of subgraphs without a Set of its name
                yield from (Port(holder, get["id"], 0) for holder in self.uses for get in holder.named(GET, name)
                            if get.get("mode", 0) != MUTED and (holder is graph or not holder.named(SET, name)))
        else:
            kinds = (kind, "*") if kind_of(node["inputs"][link.target_slot]) == "*" else (kind,)
            yield from (Port(graph, node["id"], i) for i, made in graph.made(node).items() if made in kinds)

    def behind(self, graph: Graph, link: Link, kind: str) -> Iterator[tuple[Graph, Node]]:
        """Yield all real nodes that a link leads to, in the end, with the graphs that hold them."""
        seen, queue = set(), [(graph, link)]
        for current, wire in queue:
            queue += [(current, made) for made in current.spread(wire, kind)]
            node = self.reader(current, wire)
            if node is not None:
                yield current, node
            if node is not None and is_ours(node):
                continue
            for port in self.beyond(current, wire, kind):
                if port not in seen:
                    seen.add(port)
                    queue += [(port.graph, link) for link in port.graph.links_of(port.node, port.slot)]


@contextmanager
def as_workflow_error() -> Iterator[None]:
    """Raise errors due to values that ComfyUI never saves as ``WorkflowError``."""
    try:
        yield
    except WorkflowError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise WorkflowError(f"it is damaged ({type(error).__name__}: {str(error)[:200]})") from error


@as_workflow_error()
def change(data: Data, how: Callable[[Workflow], T]) -> T:
    """Change a workflow in place, and return the function's result.

    Raises:
        WorkflowError: it is no workflow, or is damaged.
    """
    return how(Workflow(data))


def check_format(data: Data) -> None:
    """Refuse data that is no workflow in UI format 0.4."""
    if not isinstance(data.get("nodes"), list) or not isinstance(data.get("links"), list):
        raise WorkflowError("this is no workflow in UI format: it has no lists 'nodes' and 'links'")
    if data.get("version") != 0.4:
        raise WorkflowError(f"only workflows of version 0.4 are understood, this is {data.get('version')!r}")


def definitions(data: Data) -> Iterator[Data]:
    """Yield the definitions of all subgraphs, also of nested ones."""
    for inner in (data.get("definitions") or {}).get("subgraphs") or []:
        yield inner
        yield from definitions(inner)


def is_ours(node: Node) -> bool:
    """Tell whether a node is this pack's."""
    return node["type"].startswith("TRT")


def name_of(node: Node) -> Any:
    """Return the name that Set and Get nodes share."""
    values = node.get("widgets_values")
    return values[0] if isinstance(values, list) and values else None


def _inner_slot(inner: Data, use: Node, slot: int) -> int:
    """Return the input of a subgraph that an input of its node stands for."""
    name = use["inputs"][slot]["name"]
    return next((i for i, socket in enumerate(inner.get("inputs") or []) if socket["name"] == name), slot)


def _state(graph: Graph) -> Data:
    return graph.data.get("state") or {}
