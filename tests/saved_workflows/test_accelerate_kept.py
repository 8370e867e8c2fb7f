"""Files that are written by scripts, damaged or huge: nothing that is not understood is changed or dropped."""

from __future__ import annotations

import copy
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from drawn_workflows import OBJECT_INFO, TYPES, drawn, subgraph, wires
from hybrid_trt.saved_workflows.accelerate import accelerate, remove
from hybrid_trt.saved_workflows.graph import Workflow, definitions
from hybrid_trt.saved_workflows.to_prompt import change_prompt, to_prompt

FLOW = {"load": "Loader", "s": "Sampler", "t": "Refine", "decode": "DecodeLatent"}
WIRES = "load.0 s.0, s.0 t.1, load.0 t.0, t.0 decode.0, load.2 decode.1"
TYPES["Switch"] = (["*"], ["*"])
OBJECT_INFO["Switch"] = {"input": {"required": {"value": ["*"]}}, "output": ["*"]}


def typed(data: dict[str, Any]) -> dict[str, Any]:
    """Return a workflow whose links have the types of their inputs, as the page saves them."""
    made = {node["id"]: node for node in data["nodes"]}
    for link in data["links"]:
        link[5] = made[link[3]]["inputs"][link[4]]["type"]
    return data


def flow() -> dict[str, Any]:
    return typed(drawn(FLOW, WIRES))


def named(data: dict[str, Any], title: str) -> dict[str, Any]:
    return next(node for node in data["nodes"] if node.get("title") == title)


def round_trip(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return an accelerated copy and the types that were added; what is taken out again leaves the file's meaning."""
    changed = copy.deepcopy(data)
    added = [node["type"] for node in accelerate(Workflow(changed))]
    back = copy.deepcopy(changed)
    remove(Workflow(back))
    assert meaning(back) == meaning(data)
    return changed, added


def meaning(data: dict[str, Any]) -> dict[str, Any]:
    """Return a workflow without where things stand, how links are ordered, and which ids were given last."""
    def plain(graph: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in graph.items() if key not in (
            "nodes", "links", "groups", "state", "last_node_id", "last_link_id", "definitions", "reroutes", "extra",
            "inputNode", "outputNode", "inputs", "outputs")}  # fmt: skip
        nodes = [{key: value for key, value in node.items() if key not in ("pos", "outputs")}
                 | ({"outputs": listed(node["outputs"], "links")} if "outputs" in node else {})
                 for node in graph["nodes"]]  # fmt: skip
        links = sorted({json.dumps(link, sort_keys=True) for link in graph["links"] if link})
        ends = {side: listed(graph.get(side) or [], "linkIds") for side in ("inputs", "outputs")}
        inner = [plain(one) for one in (graph.get("definitions") or {}).get("subgraphs") or []]
        return kept | ends | {"nodes": nodes, "links": links, "inner": inner}
    return plain(data)


def listed(sockets: list[dict[str, Any]] | None, name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "pos"} | {name: sorted(one.get(name) or [])}
            for one in sockets or []]


@pytest.mark.fault("a workflow's nodes have no list of outputs", see="nothing: their links stay, and it is accelerated")
@pytest.mark.parametrize("bare", [["s"], ["decode"], ["load"], ["t"], ["load", "s", "t", "decode"]], ids=" ".join)
def test_nodes_without_a_list_of_outputs_keep_their_links(bare: list[str]) -> None:
    data = flow()
    for title in bare:
        del named(data, title)["outputs"]
    changed, added = round_trip(data)
    assert added == ["TRTAccelerate"]
    assert all("outputs" not in named(changed, title) for title in bare)
    assert wires(changed) == wires(round_trip(flow())[0])


def test_inside_a_subgraph_too() -> None:
    inside = subgraph({"s": "Sampler"}, "in.0 s.0, s.0 out.0", "MODEL", "LATENT")
    del inside["nodes"][0]["outputs"]
    inside["links"][1]["type"] = "LATENT"
    changed, added = round_trip(drawn({"load": "Loader", "sub": "P"}, "load.0 sub.0", {"P": inside}))
    assert added == ["TRTAccelerate"]
    assert len(changed["definitions"]["subgraphs"][0]["links"]) == 2


@pytest.mark.fault("a node of an exported workflow has more outputs than the server says",
                   see="nothing: its links stay")
def test_an_api_prompt_keeps_links_from_outputs_that_the_server_does_not_declare() -> None:
    prompt = {"1": {"class_type": "Loader", "inputs": {}},
              "2": {"class_type": "Switch", "inputs": {"value": ["1", 0]}},
              "3": {"class_type": "Sampler", "inputs": {"MODEL": ["2", 1]}},
              "4": {"class_type": "Refine", "inputs": {"MODEL": ["2", 2], "LATENT": ["3", 0]}},
              "5": {"class_type": "Decode", "inputs": {"VAE": ["1", -1]}}}  # fmt: skip
    changed = copy.deepcopy(prompt)
    (added,) = change_prompt(changed, OBJECT_INFO, accelerate)
    assert {key: entry for key, entry in changed.items() if key in "345"} == {
        key: entry for key, entry in prompt.items() if key in "345"}
    assert changed["2"]["inputs"] == {"value": [str(added["id"]), 0]}
    change_prompt(changed, OBJECT_INFO, remove)
    assert changed == prompt


@pytest.mark.fault("two nodes of a workflow have one id", see="both stay as they were, and a sentence names the id")
@pytest.mark.parametrize("where", [0, 9], ids=["first", "last"])
@pytest.mark.parametrize(("twin", "added"), [("decode", ["TRTAccelerate"]), ("s", ["TRTAccelerate"]), ("load", [])])
def test_nodes_that_share_an_id_are_kept_and_told(twin: str, added: list[str], where: int) -> None:
    data = flow()
    note = {"id": named(data, twin)["id"], "type": "Note", "mode": 0, "pos": [0, 0], "size": [9, 9], "inputs": [],
            "outputs": []}  # fmt: skip
    data["nodes"].insert(where, note)
    changed, kinds = round_trip(data)
    assert kinds == added
    assert sum(node["id"] == note["id"] for node in changed["nodes"]) == 2
    assert f"nodes {note['id']}." in Workflow(changed).left_alone()


@pytest.mark.fault("two inputs of a workflow name one link", see="it stays as it was, and a sentence names it")
def test_a_link_that_two_inputs_name_stays_as_it_is_and_is_told() -> None:
    data = flow()
    named(data, "t")["inputs"][0]["link"] = named(data, "s")["inputs"][0]["link"]
    changed, added = round_trip(data)
    assert added == []
    assert changed["links"][-1] in data["links"]
    assert "links 1." in Workflow(changed).left_alone()
    assert not Workflow(flow()).left_alone()


@pytest.mark.parametrize("other", [[1, 3, 0, 2, 0, "MODEL"], [1, 77, 0, 2, 0, "MODEL"]], ids=["else", "nowhere"])
def test_of_two_links_with_one_id_neither_is_changed(other: list[Any]) -> None:
    data = flow()
    data["links"].append(other)
    changed, _ = round_trip(data)
    assert all(link in changed["links"] for link in data["links"] if link[0] == 1)
    assert "links 1." in Workflow(changed).left_alone()
    data["links"][-1] = list(data["links"][0])  # the same again means the same
    assert not Workflow(data).left_alone()


def test_our_node_stays_where_a_link_that_cannot_be_followed_hangs_on_it() -> None:
    data = flow()
    accelerate(Workflow(data))
    ours = data["nodes"][-1]
    data["links"].append([99, ours["id"], 0, 77, 0, "MODEL"])
    for title in ("s", "t"):
        named(data, title)["inputs"][0]["link"] = 99
    before = copy.deepcopy(data)
    assert remove(Workflow(data)) == []
    assert meaning(data) == meaning(before)


@pytest.mark.fault("a slot of a workflow has no type", see="nothing: it is of any type")
@pytest.mark.parametrize("kind", [{}, {"type": None}], ids=["none", "null"])
def test_a_slot_without_a_type_is_of_any(kind: dict[str, Any]) -> None:
    data = typed(drawn({**FLOW, "any": "Switch", "past": "Switch|bypassed", "u": "Sampler", "lone": "Switch"},
                       f"{WIRES}, load.0 any.0, any.0 past.0, past.0 u.0"))  # fmt: skip
    for socket in [named(data, title)[side][0] for title in ("any", "past", "lone") for side in ("inputs", "outputs")]:
        del socket["type"]
        socket.update(kind)
    changed, added = round_trip(data)
    assert added == ["TRTAccelerate"]
    assert to_prompt(changed, OBJECT_INFO)[str(named(data, "u")["id"])]["inputs"]["MODEL"][1] == 0


@pytest.mark.parametrize("api", [False, True], ids=["UI", "API"])
def test_a_chain_of_many_loras_takes_no_minutes(api: bool) -> None:
    many = 1600
    names = ["load", *(f"l{i}" for i in range(many))]
    data = drawn({"load": "Loader", **dict.fromkeys(names[1:], "LoraLoader"), "s": "Sampler"},
                 ", ".join(f"{a}.0 {b}.0" for a, b in zip(names, [*names[1:], "s"], strict=True)))  # fmt: skip
    start = time.process_time()
    if api:
        prompt = {str(node["id"]): {"class_type": node["type"], "inputs": {
            "MODEL": [str(node["id"] - 1), 0]} if node["id"] > 1 else {}} for node in data["nodes"]}  # fmt: skip
        added = change_prompt(prompt, OBJECT_INFO, accelerate)
    else:
        added = accelerate(Workflow(data))
    assert len(added) == 1
    assert time.process_time() - start < 4, "it took 100 s when each LoRA searched all links"


TEMPLATES = sorted(Path(sysconfig.get_paths()["purelib"]).glob("comfyui_workflow_templates*/templates/*.json"))


def test_all_workflows_of_comfyui_are_the_same_again_once_acceleration_is_taken_out() -> None:
    added = []
    for path in TEMPLATES:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("version") == 0.4:
            try:
                changed, kinds = round_trip(data)
                assert groups(changed) == groups(data)
            except AssertionError as error:
                raise AssertionError(path.name) from error
            added += kinds
    assert len(added) > 100


def groups(data: dict[str, Any]) -> list[Any]:
    """Return the nodes in each group, those of this pack left out, and the pairs of groups that overlap."""
    found: list[Any] = []
    for graph in (data, *definitions(data)):
        boxes = [group["bounding"] for group in graph.get("groups") or []]
        nodes = [(node["id"], *middle(node)) for node in graph["nodes"] if not node["type"].startswith("TRT")]
        found.append([sorted(str(i) for i, x, y in nodes if gx <= x < gx + gw and gy <= y < gy + gh)
                      for gx, gy, gw, gh in boxes])  # fmt: skip
        found.append([(i, j) for i, (x, y, w, h) in enumerate(boxes) for j, (u, v, p, q) in enumerate(boxes)
                      if x < u + p and u < x + w and y < v + q and v < y + h])  # fmt: skip
    return found


def middle(node: dict[str, Any]) -> tuple[float, float]:
    """Return the middle of what the page draws of a node, with its title."""
    (x, y), (width, height) = (list(one.values()) if isinstance(one, dict) else one
                               for one in (node["pos"], node["size"]))  # fmt: skip
    collapsed = (node.get("flags") or {}).get("collapsed")
    return x + min(width, 120 if collapsed else width) / 2, y - 30 + (30 if collapsed else height + 30) / 2


def grouped(bounding: dict[str, list[float]], **boxes: list[float]) -> dict[str, Any]:
    """Return a workflow of a loader and a sampler beside some more nodes, in groups."""
    data = drawn({"load": "Loader", **dict.fromkeys(boxes, "FreeU"), "s": "Sampler"}, "load.0 s.0")
    for title, (x, y, width, height) in {"load": [0, 0, 300, 100], "s": [800, 0, 300, 260], **boxes}.items():
        named(data, title).update(pos=[x, y], size=[width, height])
    data["groups"] = [{"title": title, "bounding": list(box)} for title, box in bounding.items()]
    return data


@pytest.mark.parametrize("data", [
    grouped({"models": [-20, -80, 340, 190], "below": [-20, 130, 340, 300]}, below=[0, 210, 300, 200]),
    grouped({"models": [-20, -80, 340, 190]}, below=[0, 210, 300, 100]),
    grouped({"models": [-20, -80, 340, 190]}, below=[20, 60, 300, 200]),
    grouped({"models": [-20, -80, 340, 190]}, wide=[200, 150, 600, 100]),
    grouped({"models": [-20, -80, 340, 190], "all": [-60, -120, 1300, 700]}, below=[0, 210, 300, 100]),
    grouped({"left": [-20, -80, 370, 600]}, wide=[100, 300, 600, 100]),
    grouped({"left": [-20, -80, 370, 600]}, wide=[290, 300, 60, 100]),
    grouped({"right": [500, -80, 700, 600]}, wide=[250, -60, 700, 20], crosses=[100, 300, 500, 100]),
    grouped({"models": [-20, -80, 340, 190], "across": [200, 120, 300, 300], "title": [-20, 500, 900, 60]},
            across=[210, 200, 280, 100]),
], ids=["a group below", "a node below", "a node half below", "a wide node", "nested", "left", "edge", "right",
        "across"])
def test_groups_keep_the_nodes_that_they_had_and_overlap_no_others(data: dict[str, Any]) -> None:
    changed, added = round_trip(data)
    assert added == ["TRTAccelerate"]
    assert groups(changed) == groups(data)
    boxes = [(*node["pos"], *node["size"]) for node in changed["nodes"]]
    x, y, width, height = boxes[-1]
    assert not any(x < u + w and u < x + width and y < v + h and v < y + height for u, v, w, h in boxes[:-1])
