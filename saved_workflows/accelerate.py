"""Acceleration of a workflow: TRT Accelerate behind each model loader, its LoRAs and patches that engines compute.

The node also takes in the VAE and up to four ControlNets of its graph; further ones get TRT ControlNet Engine.
Removal restores the former wires.

Nodes right of a new node move right, and groups grow. A group keeps its nodes: the page counts a node if its middle is
in the group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import starmap
from typing import Any

from ..node_names import (
    ACCELERATE,
    CONTROL_INPUTS,
    CONTROLNET_ENGINE,
    SAMPLER_PATCH,
    UNET_ENGINE,
    VAE_ENGINE,
)
from .graph import GET, INPUT_NODE, OUTPUT_NODE, SET, Graph, Link, Node, Port, Workflow, is_ours, name_of
from .node_data import TITLE, Data, drawn_box, kind_of, middle, touch

PASSES_ON = {
    ACCELERATE: ("model", "vae", *CONTROL_INPUTS),
    CONTROLNET_ENGINE: ("control_net",),
    VAE_ENGINE: ("vae",),
    SAMPLER_PATCH: ("model",),
}
"""Our nodes that pass values on -> their inputs in the order of their outputs."""
SERVING = (*PASSES_ON, UNET_ENGINE)
"""Our nodes that bring engines: nodes behind them need no more. TRT Stream uses the engines that it gets."""
GAP = 50.0
"""Pixels between our node and its neighbours."""
SIZES = {ACCELERATE: (330.0, 400.0), CONTROLNET_ENGINE: (330.0, 300.0)}
_KINDS = {"model": "MODEL", "vae": "VAE"}
_CHANGES_WEIGHTS = re.compile("lora|modelmerge", re.IGNORECASE)
_NO_VAE_ENGINE = re.compile(
    r"hunyuan(?!_?video_?1\.?5|_?image_?2)|refiner|cosmos|mochi|cogvideo|taehv|taew|audio|ace_step",
    re.IGNORECASE)
"""Names of VAEs that no engine serves: most of videos, and sounds."""
_NO_RUN = {"MODEL", "CLIP", "VAE", "SIGMAS"}
"""Output types of nodes that call no network: patches, loaders, schedulers."""
_PLAIN = {"IMAGE", "LATENT", "MASK", "CONDITIONING", "CLIP", "VAE", "CONTROL_NET", "SIGMAS", "STRING", "INT", "FLOAT",
          "BOOLEAN", "COMBO"}  # fmt: skip
"""Types that carry no model; pipes and contexts do."""


def accelerate(workflow: Workflow) -> list[Node]:
    """Accelerate a workflow and return the added nodes."""
    added: list[tuple[Graph, Node]] = []
    seen: set[Port] = set()
    for source in sorted(_sources(workflow, "MODEL"), key=lambda port: len(_before(workflow, port))):
        for port, links in list(_model_places(workflow, source, seen)):
            added.append((port.graph, _insert(workflow, port, links, ACCELERATE, "model")))
    for kind, names in (("CONTROL_NET", CONTROL_INPUTS), ("VAE", ("vae",))):
        ours = [(graph, node) for graph, node in added if node["type"] == ACCELERATE]
        branches = [(graph, node, set(graph.needing(node["id"]))) for graph, node in ours]
        for port in list(_sources(workflow, kind)):
            links = _unserved(workflow, port, kind)
            hosts = [_host(port.graph, link.target, branches) for link in links]
            for node in (node for graph, node, _ in branches if graph is port.graph and node in hosts):
                own = [link for link, host in zip(links, hosts, strict=True) if host is node]
                any(_take(workflow, node, name, port, own) for name in names)
            links = [link for link in links if port.graph.links[link.id] == link]
            if links and kind == "CONTROL_NET":
                added.append((port.graph, _insert(workflow, port, links, CONTROLNET_ENGINE, "control_net")))
    workflow.save()
    return [node for _, node in added]


def remove(workflow: Workflow) -> list[Node]:
    """Remove our nodes, restore the former wires, and return the removed nodes."""
    gone: list[Node] = []
    for graph in (workflow.root, *workflow.subgraphs.values()):
        for node in [node for node in graph.nodes.values() if node["type"] in PASSES_ON and not graph.loses(node)]:
            for slot, name in enumerate(PASSES_ON[node["type"]]):
                before = graph.link_into(node, name)
                for link in graph.links_of(node["id"], slot):
                    if before is None:
                        graph.cut(link)
                    else:
                        graph.connect(replace(link, origin=before.origin, slot=before.slot))
            _drop(graph, node)
            gone.append(node)
        for node in list(graph.nodes.values()) if gone else ():  # nodes that served a patch
            if node["type"] == UNET_ENGINE and not graph.links_of(node["id"], 0) and not graph.loses(node):
                _drop(graph, node)
    workflow.save()
    return gone


def _drop(graph: Graph, node: Node) -> None:
    for link in graph.links_at(node["id"]):
        graph.cut(link)
    del graph.nodes[node["id"]]


def _sources(workflow: Workflow, kind: str) -> Iterator[Port]:
    """Yield the outputs of loaders of a kind: of nodes without inputs of that kind."""
    for graph in workflow.uses:
        for node in graph.nodes.values():
            takes = graph.fed(node, kind) or any(kind_of(socket) in (kind, "*") and socket.get("link") is not None
                                                 for socket in node.get("inputs") or [])  # fmt: skip
            none = kind == "VAE" and any(map(_NO_VAE_ENGINE.search, (node["type"], str(name_of(node)))))
            if workflow.is_real(node) and not is_ours(node) and not takes and not none:
                yield from (Port(graph, node["id"], slot) for slot, made in graph.made(node).items() if made == kind)


def _before(workflow: Workflow, port: Port) -> list[Node]:
    """Return the node of an output, and the nodes from which a pipe may have brought it a model."""
    queue = [(port.graph, port.node)]
    seen = set(queue)
    for graph, key in queue:
        kind = graph.nodes.get(key, {}).get("type")
        plain = _PLAIN if len(seen) > 1 else _PLAIN | {"MODEL"}
        more = [(graph, link.origin) for link in graph.links_into(key) if link.type not in plain]
        if key == INPUT_NODE:
            more += [(outer, use["id"]) for outer, use in workflow.uses.get(graph, ())]
        elif kind in workflow.subgraphs:
            more.append((workflow.subgraphs[kind], OUTPUT_NODE))
        elif kind == GET:
            name = name_of(graph.nodes[key])
            more += [(holder, found["id"]) for holder in workflow.uses for found in holder.named(SET, name)]
        queue += dict.fromkeys(place for place in more if place not in seen)
        seen.update(more)
    return [graph.nodes[key] for graph, key in queue if key in graph.nodes]


def _served(workflow: Workflow, port: Port) -> bool:
    """Tell whether an output's values from a pipe have engines already."""
    return any(node["type"] in SERVING for node in _before(workflow, port))


def _model_places(workflow: Workflow, source: Port, seen: set[Port]) -> Iterator[tuple[Port, list[Link]]]:
    """Yield the places for our node, with the links to take: behind the last LoRA on each way to a sampler."""
    queue = [source]
    seen.add(source)
    for port in queue:
        links, served = [], port is source and _served(workflow, port)
        for link in port.graph.links_of(port.node, port.slot):
            if any(starmap(_changes_weights, workflow.behind(port.graph, link, "MODEL"))):
                more = [place for place in workflow.beyond(port.graph, link, "MODEL") if place not in seen]
                seen.update(more)
                queue += more
                continue
            behind = list(workflow.behind(port.graph, link, "MODEL"))
            served = served or any(node["type"] in SERVING for _, node in behind)
            if any(starmap(_runs, behind)):
                links.append(link)
        if links and not served:
            yield port, links


def _changes_weights(graph: Graph, node: Node) -> bool:
    """Tell whether a node gives a MODEL other weights, as LoRAs do, or a patch with weights that engines compute."""
    patch = any(kind_of(socket) == "MODEL_PATCH" for socket in node.get("inputs") or ())
    changes = (patch or bool(_CHANGES_WEIGHTS.search(node["type"]))) and not is_ours(node)
    return changes and "MODEL" in graph.made(node).values()


def _runs(graph: Graph, node: Node) -> bool:
    """Tell whether a node runs a network that it gets, as samplers do."""
    return not _NO_RUN.issuperset(graph.made(node).values())


def _host(graph: Graph, reader: Any, branches: list[tuple[Graph, Node, set[Any]]]) -> Node | None:
    """Return the node that a reader depends on: muting that node mutes the reader's results anyway.

    Args:
        branches: our nodes, each with the nodes that need it.
    """
    if len(branches) == 1:
        return branches[0][1]
    found = graph.needing(reader)
    ends = {reader for reader in found if OUTPUT_NODE in graph.next(reader) or not graph.next(reader)}
    fit = [(next((i for i, one in enumerate(found) if i and one in served), len(found)), len(served), order)
           for order, (holder, _, served) in enumerate(branches) if holder is graph and ends <= served]  # fmt: skip
    return branches[min(fit)[2]][1] if fit else None


def _unserved(workflow: Workflow, port: Port, kind: str) -> list[Link]:
    """Return the links of an output that lead to real nodes; none if our nodes are among these."""
    links = [] if _served(workflow, port) else port.graph.links_of(port.node, port.slot)
    behind = [[node["type"] for _, node in workflow.behind(port.graph, link, kind)] for link in links]
    return [] if any(kind in PASSES_ON for kinds in behind for kind in kinds) else [
        link for link, kinds in zip(links, behind, strict=True) if kinds]


def _take(workflow: Workflow, node: Node, name: str, port: Port, links: list[Link]) -> bool:
    """Lead links through a free input of a node, without links that would make a circle."""
    if name not in PASSES_ON[node["type"]]:
        return False
    graph, slot = port.graph, PASSES_ON[node["type"]].index(name)
    socket = node["inputs"][slot]
    if socket["link"] is not None or graph.depends_on(port.node, node["id"]):
        return False
    socket["link"] = -1  # taken, so that no Everywhere node feeds it
    links = [link for link in links if not graph.depends_on(node["id"], link.target)]  # no circle
    socket["link"] = None
    if not links:
        return False
    _lead_through(workflow, port, links, node, slot)
    return True


def _lead_through(workflow: Workflow, port: Port, links: list[Link], node: Node, slot: int) -> None:
    graph, kind = port.graph, links[0].type
    kept = {} if graph.inside else None
    for link in links:
        graph.connect(replace(link, origin=node["id"], slot=slot))
    graph.connect(Link(workflow.next_id("link"), port.node, port.slot, node["id"], slot, kind, kept))


def _insert(workflow: Workflow, port: Port, links: list[Link], kind: str, name: str) -> Node:
    sockets = [(name, _KINDS.get(name, "CONTROL_NET")) for name in PASSES_ON[kind]]
    node = {
        "id": workflow.next_id("node"), "type": kind, "pos": [0.0, 0.0], "size": list(SIZES[kind]), "flags": {},
        "order": len(port.graph.nodes), "mode": 0,
        "inputs": [{"name": name, "type": of, "link": None} for name, of in sockets],
        "outputs": [{"name": name, "type": of, "links": []} for name, of in sockets],
        "properties": {"cnr_id": "hybrid-trt", "Node name for S&R": kind},
    }  # fmt: skip
    _place(port.graph, port.node, node)
    port.graph.nodes[node["id"]] = node
    _lead_through(workflow, port, links, node, PASSES_ON[kind].index(name))
    return node


def _place(graph: Graph, behind: Any, node: Node) -> None:
    """Give a new node a place right of the node that it follows, or of the subgraph's inputs."""
    left, y, width, _ = _box(graph, behind)
    start = left + width
    height = node["size"][1]
    in_row = [other for other in graph.nodes.values()
              if other["pos"][1] - TITLE < y + height + GAP / 2
              and other["pos"][1] + other["size"][1] > y - TITLE - GAP / 2]  # fmt: skip
    x = max([start, *(other["pos"][0] + other["size"][0] for other in in_row if not _moves(other, start))]) + GAP
    end = x + node["size"][0]
    next_left = min([start, *(other["pos"][0] for other in in_row if _moves(other, start))])
    _make_room(graph, start, end + GAP - next_left)
    node["pos"] = [x, y]
    for group in graph.data.get("groups") or []:
        gx, gy, gw, gh = group["bounding"]
        if gx <= left and start <= gx + gw and gy <= y <= gy + gh:
            wide = max(gw, end + GAP / 2 - gx)
            grown = ([gx, gy, wide, high] for high in (max(gh, y + height + GAP / 2 - gy), gh))
            group["bounding"] = next((box for box in grown if not _takes_in(graph, group, box)), group["bounding"])


def _takes_in(graph: Graph, group: Data, grown: list[float]) -> bool:
    """Tell whether a grown group newly touches a node or a group, or newly has the middle of a node."""
    boxes = [other["bounding"] for other in graph.data["groups"] if other is not group]
    boxes += [box for node in graph.nodes.values() for box in (drawn_box(node), middle(node))]
    return any(touch(grown, box) and not touch(group["bounding"], box) for box in boxes)


def _moves(node: Node, start: float) -> bool:
    """Tell whether the middle of a node, or a reroute, is right of a line: it moves like groups that hold it."""
    return middle(node)[0] >= start - 1


def _box(graph: Graph, node: Any) -> list[float]:
    if node == INPUT_NODE:
        return list(graph.data["inputNode"]["bounding"])
    return [*graph.nodes[node]["pos"], *graph.nodes[node]["size"]]


def _make_room(graph: Graph, start: float, width: float) -> None:
    """Move nodes right whose middle is right of a line; groups across the line grow if they hold such nodes."""
    drawn = (*graph.nodes.values(), *_reroutes(graph.data))
    moving = [node for node in drawn if _moves(node, start)]
    for group in graph.data.get("groups") or []:
        box = group["bounding"]
        if box[0] >= start - 1:
            box[0] += width
        elif any(touch(box, middle(node)) for node in moving):
            box[2] += width
    for node in moving:
        node["pos"] = [node["pos"][0] + width, node["pos"][1]]
    for side in ("inputNode", "outputNode"):
        box = graph.data[side]["bounding"] if graph.inside else [start - 2]
        box[0] += width if box[0] >= start - 1 else 0


def _reroutes(data: Data) -> list[Data]:
    return [*(data.get("reroutes") or []), *((data.get("extra") or {}).get("reroutes") or [])]
