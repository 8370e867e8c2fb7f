"""Acceleration of workflows whose models go through *Anything Everywhere* nodes, which send to inputs by filters."""

from __future__ import annotations

from typing import Any

import pytest
from drawn_workflows import accelerated, drawn, restored, subgraph, wires
from hybrid_trt.saved_workflows.graph import Workflow

SAMPLED = subgraph({"s": "Sampler"}, "in.0 s.0, s.0 out.0", "MODEL", "LATENT")


def broadcast(nodes: dict[str, str], wired: str, inside: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a workflow whose links have the types of what they begin at, as the page saves them."""
    data = drawn(nodes, wired, inside)
    made = {node["id"]: node["outputs"] for node in data["nodes"]}
    for link in data["links"]:
        link[5] = made[link[1]][link[2]]["type"]
    return data


AIR = {"load": "Loader", "air": "Anything Everywhere", "s": "Sampler"}


@pytest.mark.parametrize(("nodes", "wired", "before", "behind"), [
    ({**AIR, "t": "Sampler"}, "load.0 air.0", "Loader", ["Anything Everywhere"]),
    ({**AIR, "t": "Sampler"}, "load.0 air.0, load.0 t.0", "Loader", ["Anything Everywhere", "Sampler"]),
    ({**AIR, "free": "FreeU"}, "load.0 free.0, free.0 air.0", "Loader", ["FreeU"]),
    ({**AIR, "free": "FreeU"}, "load.0 air.0, free.0 s.0", "Loader", ["Anything Everywhere"]),
    ({**AIR, "lora": "LoraLoader"}, "load.0 air.0, lora.0 s.0", "LoraLoader", ["Sampler"]),
    ({**AIR, "air": "Anything Everywhere|muted"}, "load.0 air.0", None, []),
    ({**AIR, "s": "Sampler|muted"}, "load.0 air.0", None, []),
    ({**AIR, "s": "Scheduler"}, "load.0 air.0", None, []),
    ({**AIR, "other": "PipeLoader", "c": "Context"}, "load.2 air.0, other.0 c.0, c.1 s.0", "Context", ["Sampler"]),
    ({**AIR, "s": "P"}, "load.0 air.0", "Loader", ["Anything Everywhere"]),
])  # fmt: skip
def test_a_model_that_the_page_wires_everywhere_gets_a_node_before(
    nodes: dict[str, str], wired: str, before: str | None, behind: list[str]
) -> None:
    data = broadcast(nodes, wired, {"P": SAMPLED})
    changed, added = accelerated(data)
    graph = Workflow(changed).root
    types = {number: node["type"] for number, node in graph.nodes.items()}
    ours = [link for link in graph.links.values() if link.type == "MODEL"]
    assert added == (["TRTAccelerate"] if before else [])
    assert [types[link.origin] for link in ours if types[link.target] == "TRTAccelerate"] == [before] * len(added)
    assert sorted(types[link.target] for link in ours if types[link.origin] == "TRTAccelerate") == behind
    assert restored(changed, data)


def test_a_vae_that_the_page_wires_everywhere_goes_through_the_node_and_a_controlnet_through_its_own() -> None:
    data = broadcast({**AIR, "more": "Anything Everywhere", "third": "Anything Everywhere", "decode": "Decode",
                      "net": "ControlNetLoader", "apply": "Apply"}, "load.0 air.0, load.2 more.0, net.0 third.0")
    changed, added = accelerated(data)
    assert added == ["TRTAccelerate", "TRTControlNetEngine"]
    node = next(node for node in changed["nodes"] if node["type"] == "TRTAccelerate")
    assert [socket["name"] for socket in node["inputs"] if socket["link"] is not None] == ["model", "vae"]
    assert [len(output["links"]) for output in node["outputs"]] == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("wired", ["net.0 apply.0, ", ""], ids=["by wire", "by air"])
def test_what_the_page_wires_everywhere_makes_no_circle(wired: str) -> None:
    """A ControlNet is made of the model, and the VAE and the ControlNet go everywhere too."""
    nodes = {**AIR, "more": "Anything Everywhere", "third": "Anything Everywhere", "net": "DiffControlNetLoader",
             "apply": "Apply", "fun": "ZImageFunControlnet", "decode": "Decode"}  # fmt: skip
    data = broadcast(nodes, f"{wired}load.0 fun.0, fun.0 air.0, load.2 more.0, net.0 third.0")
    changed, added = accelerated(data)
    node = next(node for node in changed["nodes"] if node["type"] == "TRTAccelerate")
    assert [socket["name"] for socket in node["inputs"] if socket["link"] is not None] == ["model"]
    assert added[0] == "TRTAccelerate"
    assert restored(changed, data)


def filtered(**filters: Any) -> dict[str, Any]:
    """Return a workflow of a sampler, one in a group, and an Everywhere node in the same group with filters."""
    data = broadcast({"load": "Loader", "air": "Anything Everywhere", "first pass": "Sampler", "s": "Scheduler"},
                     "load.0 air.0")
    by_title = {node["title"]: node for node in data["nodes"]}
    by_title["first pass"]["color"] = "#322"
    boxes = (by_title["first pass"]["pos"], by_title["air"]["pos"])
    data["groups"] = [{"title": title, "bounding": [x - 10, y - 50, 220, 200]}
                      for title, (x, y) in zip(("Base", "Models"), boxes, strict=True)]  # fmt: skip
    by_title["air"]["properties"] = {"ue_properties": {"version": "7.4", **filters}}
    return data


def older(*values: str, **restrictions: int) -> dict[str, Any]:
    """Return it with the filters where versions before 7 have them."""
    data = filtered()
    air = next(node for node in data["nodes"] if node["title"] == "air")
    return data | {"nodes": [
        one if one is not air else {**air, "type": "Anything Everywhere?", "widgets_values": list(values),
                                    "properties": restrictions} for one in data["nodes"]]}  # fmt: skip


@pytest.mark.fault(
    "a workflow sends its model to some nodes only, by the filters of Anything Everywhere",
    see="nothing: the filters are followed; where one is not understood, its links stay, and a sentence says so",
)
@pytest.mark.parametrize(("data", "feeds"), [
    (filtered(), True),
    (filtered(title_regex="^first"), True), (filtered(title_regex="second"), False),
    (filtered(title_regex="second", title_regex_invert=1), True),
    (filtered(input_regex="MODEL"), True), (filtered(input_regex="positive"), False),
    (filtered(group_regex="Base|Refiner"), True), (filtered(group_regex="Refiner"), False),
    (filtered(group_restricted=1), False), (filtered(group_restricted=2), True),
    (filtered(color_restricted=1), False), (filtered(color_restricted=2), True),
    (older(".*", ".*", ".*"), True), (older("second", ".*", ".*"), False), (older("first", "MODEL", "Base"), True),
    (older(".*", ".*", ".*", group_restricted=1), False),
])  # fmt: skip
def test_only_inputs_that_the_filters_let_through_count_as_fed(data: dict[str, Any], feeds: bool) -> None:
    changed, added = accelerated(data)
    assert added == ["TRTAccelerate"] * feeds
    assert Workflow(changed).left_alone() == ""
    assert restored(changed, data)


@pytest.mark.parametrize("data", [filtered(title_regex="(?<"), older(".*", "+model", ".*")], ids=["broken", "highway"])
def test_a_link_with_a_filter_that_is_not_understood_is_left_alone_and_told(data: dict[str, Any]) -> None:
    changed, added = accelerated(data)
    assert added == []
    assert wires(changed) == wires(data)
    told = "Left as they were, because it is not clear where they lead: filters of nodes 2."
    assert Workflow(changed).left_alone() == told


def test_an_input_that_two_nodes_may_feed_gets_its_model_from_the_one_with_a_filter() -> None:
    data = broadcast({"plain": "Loader", "all": "Anything Everywhere", "load": "Loader", "air": "Anything Everywhere",
                      "s": "Sampler"}, "plain.0 all.0, load.0 air.0")  # fmt: skip
    next(node for node in data["nodes"] if node["title"] == "air")["properties"] = {
        "ue_properties": {"title_regex": "^s$"}}  # fmt: skip
    changed, added = accelerated(data)
    graph = Workflow(changed).root
    ours = next(node["id"] for node in graph.nodes.values() if node["type"] == "TRTAccelerate")
    assert added == ["TRTAccelerate"]
    assert [graph.nodes[link.origin]["title"] for link in graph.links_into(ours) if link.type == "MODEL"] == ["load"]
