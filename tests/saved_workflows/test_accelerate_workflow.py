"""Acceleration of saved workflows on their files alone: where the nodes go, on every way a graph can be wired."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from drawn_workflows import OBJECT_INFO, accelerated, drawn, restored, subgraph, wires
from hybrid_trt.saved_workflows.accelerate import PASSES_ON, accelerate, remove
from hybrid_trt.saved_workflows.graph import Workflow
from hybrid_trt.saved_workflows.to_prompt import change_prompt, is_link, to_prompt

SAMPLED = subgraph({"s": "Sampler"}, "in.0 s.0, s.0 out.0", "MODEL", "LATENT")
STYLED = subgraph({"lora": "LoraLoader"}, "in.0 lora.0, lora.0 out.0", "MODEL", "MODEL")
LOADED = subgraph({"load": "Loader", "free": "FreeU"}, "load.0 free.0, free.0 out.0", "", "MODEL")
PLAIN = {"load": "Loader", "s": "Sampler"}
LORA = {"load": "Loader", "lora": "LoraLoader", "s": "Sampler"}

#: A graph, and the ways from its samplers to their loaders once it is accelerated: names without spaces between.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": (drawn(PLAIN, "load.0 s.0"), ["Sampler TRTAccelerate Loader"]),
    "LoRA": (drawn(LORA, "load.0 lora.0, lora.0 s.0"), ["Sampler TRTAccelerate LoraLoader Loader"]),
    "two LoRAs with a patch between, a patch behind": (
        drawn({**LORA, "free": "FreeU", "more": "LoraLoader", "last": "FreeU"},
              "load.0 lora.0, lora.0 free.0, free.0 more.0, more.0 last.0, last.0 s.0"),
        ["Sampler FreeU TRTAccelerate LoraLoader FreeU LoraLoader Loader"]),
    "patch before a LoRA, a sampler between": (
        drawn({**LORA, "free": "FreeU", "t": "Sampler"}, "load.0 free.0, free.0 lora.0, free.0 t.0, lora.0 s.0"),
        ["Sampler TRTAccelerate FreeU Loader", "Sampler TRTAccelerate LoraLoader FreeU Loader"]),
    "a patch that engines compute": (
        drawn({**LORA, "file": "ModelPatchLoader", "fun": "ZImageFunControlnet", "free": "FreeU"},
              "load.0 lora.0, lora.0 fun.0, file.0 fun.1, load.2 fun.2, fun.0 free.0, free.0 s.0"),
        ["Sampler FreeU TRTAccelerate ZImageFunControlnet LoraLoader Loader"]),
    "another patch that engines compute": (
        drawn({**PLAIN, "file": "ModelPatchLoader", "lllite": "AnimaLLLiteApply"},
              "load.0 lllite.0, file.0 lllite.1, lllite.0 s.0"),
        ["Sampler TRTAccelerate AnimaLLLiteApply Loader"]),
    "merged models": (
        drawn({**PLAIN, "other": "Loader", "merge": "ModelMergeSimple"},
              "load.0 merge.0, other.0 merge.1, merge.0 s.0"),
        ["Sampler TRTAccelerate ModelMergeSimple Loader"]),
    "a stream": (
        drawn({"load": "Loader", "lora": "LoraLoader", "s": "TRTStream"}, "load.0 lora.0, lora.0 s.0"),
        ["TRTStream TRTAccelerate LoraLoader Loader"]),
    "two samplers share one way": (
        drawn({**PLAIN, "t": "Sampler"}, "load.0 s.0, load.0 t.0"), ["Sampler TRTAccelerate Loader"] * 2),
    "with and without LoRA": (
        drawn({**LORA, "t": "Sampler"}, "load.0 lora.0, lora.0 s.0, load.0 t.0"),
        ["Sampler TRTAccelerate Loader", "Sampler TRTAccelerate LoraLoader Loader"]),
    "a scheduler alone needs none": (
        drawn({**LORA, "sigmas": "Scheduler", "file": "ModelSave"},
              "load.0 lora.0, lora.0 s.0, load.0 sigmas.0, load.0 file.0"),
        ["Sampler TRTAccelerate LoraLoader Loader"]),
    "bypassed LoRA": (
        drawn({"load": "Loader", "lora": "LoraLoader|bypassed", "s": "Sampler"},
              "load.0 lora.0, load.1 lora.1, lora.0 s.0"),
        ["Sampler TRTAccelerate Loader"]),
    "muted sampler": (
        drawn({**PLAIN, "lora": "LoraLoader", "t": "Sampler|muted"}, "load.0 s.0, load.0 lora.0, lora.0 t.0"),
        ["Sampler TRTAccelerate Loader"]),
    "LoRA behind a Reroute": (
        drawn({**LORA, "r": "Reroute", "t": "Sampler"}, "load.0 r.0, r.0 lora.0, r.0 t.0, lora.0 s.0"),
        ["Sampler TRTAccelerate Loader", "Sampler TRTAccelerate LoraLoader Loader"]),
    "rgthree's Reroute and Any Switch": (
        drawn({**LORA, "r": "Reroute (rgthree)", "any": "Any Switch (rgthree)"},
              "load.0 r.0, r.0 any.1, any.0 lora.0, lora.0 s.0"),
        ["Sampler TRTAccelerate LoraLoader Any Switch (rgthree) Loader"]),
    "Set and Get": (
        drawn({**LORA, "set": "SetNode|m", "get": "GetNode|m", "other": "GetNode|x"},
              "load.0 set.0, get.0 lora.0, lora.0 s.0"), ["Sampler TRTAccelerate LoraLoader Loader"]),
    "loader inside, LoRA outside": (
        drawn({"sub": "L", "lora": "LoraLoader", "s": "Sampler"}, "sub.0 lora.0, lora.0 s.0", {"L": LOADED}),
        ["Sampler TRTAccelerate LoraLoader FreeU Loader"]),
    "loader outside, LoRA inside": (
        drawn({"load": "Loader", "sub": "S", "s": "Sampler"}, "load.0 sub.0, sub.0 s.0", {"S": STYLED}),
        ["Sampler TRTAccelerate LoraLoader Loader"]),
    "LoRA inside, used twice in a row": (
        drawn({"load": "Loader", "a": "S", "b": "S", "s": "Sampler"}, "load.0 a.0, a.0 b.0, b.0 s.0", {"S": STYLED}),
        ["Sampler TRTAccelerate LoraLoader LoraLoader Loader"]),
    "sampler inside, used with and without LoRA": (
        drawn({"load": "Loader", "lora": "LoraLoader", "a": "P", "b": "P"}, "load.0 lora.0, lora.0 a.0, load.0 b.0",
              {"P": SAMPLED}),
        ["Sampler TRTAccelerate LoraLoader Loader", "Sampler TRTAccelerate Loader"]),
    "loader inside, used twice": (
        drawn({"a": "L", "b": "L", "lora": "LoraLoader", "s": "Sampler", "t": "Sampler"},
              "a.0 lora.0, lora.0 s.0, b.0 t.0", {"L": LOADED}),
        ["Sampler TRTAccelerate FreeU Loader", "Sampler TRTAccelerate LoraLoader FreeU Loader"]),
    "two pipes in a row, the last one first": (
        drawn({"from2": "FromPipe", "to2": "ToPipe", "from": "FromPipe", "to": "ToPipe", **PLAIN, "t": "Sampler"},
              "load.0 to.0, to.0 from.0, from.0 to2.0, to2.0 from2.0, from2.0 s.0, from.0 t.0"),
        ["Sampler FromPipe ToPipe FromPipe ToPipe TRTAccelerate Loader",
         "Sampler FromPipe ToPipe TRTAccelerate Loader"]),
    "a LoRA behind a pipe": (
        drawn({**LORA, "to": "ToPipe", "from": "FromPipe", "t": "Sampler"},
              "load.0 to.0, to.0 from.0, from.0 lora.0, lora.0 s.0, from.0 t.0"),
        ["Sampler FromPipe ToPipe TRTAccelerate Loader",
         "Sampler TRTAccelerate LoraLoader FromPipe ToPipe TRTAccelerate Loader"]),
    "a pipe into a subgraph": (
        drawn({"load": "Loader", "to": "ToPipe", "sub": "F"}, "load.0 to.0, to.0 sub.0",
              {"F": subgraph({"from": "FromPipe", "s": "Sampler"}, "in.0 from.0, from.0 s.0", "PIPE", "")}),
        ["Sampler FromPipe ToPipe TRTAccelerate Loader"]),
    "a pipe out of a subgraph, by Set and Get": (
        drawn({"sub": "T", "set": "SetNode|p", "get": "GetNode|p", "from": "FromPipe", "s": "Sampler"},
              "sub.0 set.0, get.0 from.0, from.0 s.0",
              {"T": subgraph({"load": "Loader", "to": "ToPipe"}, "load.0 to.0, to.0 out.0", "", "PIPE")}),
        ["Sampler FromPipe ToPipe TRTAccelerate Loader"]),
    "a context behind a loader of pipes": (
        drawn({"load": "PipeLoader", "context": "Context", "s": "Sampler"}, "load.0 context.0, context.1 s.0"),
        ["Sampler TRTAccelerate Context PipeLoader"]),
    "two contexts in a row": (
        drawn({**PLAIN, "one": "Context", "two": "Context", "t": "Sampler"},
              "load.0 one.1, one.0 two.0, one.1 t.0, two.1 s.0"),
        ["Sampler Context Context TRTAccelerate Loader", "Sampler Context TRTAccelerate Loader"]),
    "two contexts in a row, a LoRA behind one": (
        drawn({**LORA, "one": "Context", "two": "Context", "t": "Sampler"},
              "load.0 one.1, one.0 two.0, one.1 lora.0, lora.0 s.0, two.1 t.0"),
        ["Sampler TRTAccelerate Context Context Loader", "Sampler TRTAccelerate LoraLoader Context Loader"]),
    "Set outside, Get and LoRA two graphs inside": (
        drawn({"load": "Loader", "set": "SetNode|m", "sub": "O"}, "load.0 set.0",
              {"O": subgraph({"in": "G"}, "", inside={
                  "G": subgraph({"get": "GetNode|m", "lora": "LoraLoader", "s": "Sampler"},
                                "get.0 lora.0, lora.0 s.0")})}),
        ["Sampler TRTAccelerate LoraLoader Loader"]),
    "Set outside and inside": (
        drawn({"load": "Loader", "lora": "LoraLoader", "set": "SetNode|m", "sub": "G"}, "load.0 lora.0, lora.0 set.0",
              {"G": subgraph({"load": "Loader", "set": "SetNode|m", "get": "GetNode|m", "s": "Sampler"},
                             "load.0 set.0, get.0 s.0")}),
        ["Sampler TRTAccelerate Loader"]),
    "muted and bypassed subgraphs": (
        drawn({"load": "Loader", "off": "P|muted", "past": "S|bypassed", "s": "Sampler"},
              "load.0 off.0, load.0 past.0, past.0 s.0", {"P": SAMPLED, "S": STYLED}),
        ["Sampler TRTAccelerate Loader"]),
}


def ways(prompt: dict[str, Any]) -> list[str]:
    """Return the ways from samplers to loaders, by the first input of each node that is wired."""
    def up(node: str) -> list[str]:
        sources = [value for value in prompt[node]["inputs"].values() if is_link(value)]
        return [prompt[node]["class_type"], *(up(sources[0][0]) if sources else [])]
    samplers = ("Sampler", "TRTStream")
    return sorted(" ".join(up(node)) for node, entry in prompt.items() if entry["class_type"] in samplers)


def without_ours(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt in which our nodes are passed by, as native runs it."""
    def source(value: Any) -> Any:
        while is_link(value) and (names := PASSES_ON.get(prompt[value[0]]["class_type"])):
            value = prompt[value[0]]["inputs"][names[value[1]]]
        return value
    return {node: {**entry, "inputs": {name: source(value) for name, value in entry["inputs"].items()}}
            for node, entry in prompt.items() if entry["class_type"] not in PASSES_ON}


@pytest.mark.parametrize("case", CASES)
def test_a_node_stands_behind_the_last_lora_of_each_way(case: str) -> None:
    data, expected = CASES[case]
    changed, _ = accelerated(data)
    prompt = to_prompt(changed, OBJECT_INFO)
    assert ways(prompt) == sorted(expected)
    assert without_ours(prompt) == to_prompt(data, OBJECT_INFO)


@pytest.mark.parametrize("case", CASES)
def test_a_second_press_adds_nothing_and_removal_restores_the_wiring(case: str) -> None:
    data = CASES[case][0]
    changed, _ = accelerated(data)
    assert restored(changed, data)


@pytest.mark.parametrize("case", [case for case, (data, _) in CASES.items() if "definitions" not in data])
def test_an_api_prompt_is_accelerated_as_its_workflow_is(case: str) -> None:
    data, expected = CASES[case]
    stock = to_prompt(data, OBJECT_INFO)
    prompt = copy.deepcopy(stock)
    assert change_prompt(prompt, OBJECT_INFO, accelerate)
    assert ways(prompt) == sorted(expected)
    change_prompt(prompt, OBJECT_INFO, remove)
    assert prompt == stock


@pytest.mark.parametrize(("case", "inside"), [
    ("two samplers share one way", False), ("LoRA inside, used twice in a row", False),
    ("loader outside, LoRA inside", True), ("loader inside, LoRA outside", False),
])  # fmt: skip
def test_samplers_of_one_way_share_a_node_that_stands_beside_the_last_lora(case: str, inside: bool) -> None:
    changed, added = accelerated(CASES[case][0])
    assert added == ["TRTAccelerate"]
    assert ("TRTAccelerate" in [node["type"] for node in changed["nodes"]]) is not inside


def test_four_controlnets_and_the_vae_go_through_it_and_the_fifth_gets_a_node_of_its_own() -> None:
    nets = {f"net{i}": "ControlNetLoader" for i in range(5)} | {f"apply{i}": "Apply" for i in range(5)}
    data = drawn({**PLAIN, "decode": "Decode", **nets},
                 "load.0 s.0, load.2 decode.0, " + ", ".join(f"net{i}.0 apply{i}.0" for i in range(5)))
    changed, added = accelerated(data)
    assert added == ["TRTAccelerate", "TRTControlNetEngine"]
    node = next(node for node in changed["nodes"] if node["type"] == "TRTAccelerate")
    assert all(socket["link"] is not None for socket in node["inputs"])
    assert [len(output["links"]) for output in node["outputs"]] == [1] * 6
    assert accelerated(changed)[1] == []
    assert len(remove(Workflow(changed))) == 2
    assert wires(changed) == wires(data)


@pytest.mark.parametrize(("plain", "wired", "nets", "nodes"), [
    (PLAIN, "load.0 s.0", 7, ["TRTAccelerate", *["TRTControlNetEngine"] * 3]),
    ({**PLAIN, "other": "Loader", "one": "Decode", "two": "Decode"}, "load.0 s.0, load.2 one.0, other.2 two.0", 5,
     ["TRTAccelerate", "TRTControlNetEngine"]),
    ({"other": "Loader", "one": "Decode"}, "other.2 one.0", 2, ["TRTControlNetEngine"] * 2),
], ids=["seven ControlNets", "a second VAE", "no sampler"])  # fmt: skip
def test_what_has_no_room_in_a_node_gets_one_of_its_own_or_stays_as_it_is(
    plain: dict[str, str], wired: str, nets: int, nodes: list[str]
) -> None:
    more = {f"net{i}": "ControlNetLoader" for i in range(nets)} | {f"apply{i}": "Apply" for i in range(nets)}
    data = drawn({**plain, **more}, ", ".join([wired, *(f"net{i}.0 apply{i}.0" for i in range(nets))]))
    changed, added = accelerated(data)
    assert added == nodes
    assert len(remove(Workflow(changed))) == len(nodes)
    assert wires(changed) == wires(data)


@pytest.mark.parametrize(("more", "wired"), [
    ({"net": "DiffControlNetLoader", "apply": "Apply"}, "load.0 s.0, load.0 net.0, net.0 apply.0"),
    ({"decode": "Decode", "patch": "PatchFromImage", "lora": "LoraLoader"},
     "load.2 decode.0, decode.0 patch.1, load.0 patch.0, patch.0 lora.0, lora.0 s.0"),
], ids=["a ControlNet made from the model", "a patch made by the VAE"])  # fmt: skip
def test_it_never_makes_a_circle(more: dict[str, str], wired: str) -> None:
    changed, _ = accelerated(drawn({**PLAIN, **more}, wired))
    node = next(node for node in changed["nodes"] if node["type"] == "TRTAccelerate")
    assert [socket["name"] for socket in node["inputs"] if socket["link"] is not None] == ["model"]
    to_prompt(changed, OBJECT_INFO)  # which refuses circles among reroutes
    graph = Workflow(changed).root
    assert not any(graph.depends_on(link.origin, link.target) for link in graph.links.values())


def test_a_vae_that_a_patch_before_the_node_needs_goes_through_it_for_all_others() -> None:
    data = drawn({**PLAIN, "fun": "ZImageFunControlnet", "decode": "Decode"},
                 "load.0 fun.0, load.2 fun.2, load.2 decode.0, fun.0 s.0")
    changed, _ = accelerated(data)
    graph = Workflow(changed).root
    types = {number: node["type"] for number, node in graph.nodes.items()}
    assert {(types[link.origin], types[link.target]) for link in graph.links.values() if link.slot > 0} == {
        ("Loader", "ZImageFunControlnet"), ("Loader", "TRTAccelerate"), ("TRTAccelerate", "Decode")}
    assert restored(changed, data)


@pytest.mark.parametrize("data", [
    drawn({"load": "Loader", "s": "Sampler"}, ""),
    drawn({**PLAIN, "unet": "TRTUNetEngine", "patch": "TRTSamplerPatch"},
          "load.0 unet.0, load.0 patch.0, unet.0 patch.1, patch.0 s.0"),
    drawn({**PLAIN, "t": "Sampler|muted"}, "load.0 t.0"),
    drawn({"load": "Loader", "free": "FreeU", "acc": "TRTAccelerate", "s": "Sampler"},
          "load.0 free.0, free.0 acc.0, acc.0 s.0"),
    drawn({**PLAIN, "acc": "TRTAccelerate|bypassed"}, "load.0 acc.0, acc.0 s.0"),
], ids=["nothing is wired", "engine and patch", "muted", "accelerated behind a patch", "switched off"])  # fmt: skip
def test_nothing_is_added_where_there_is_nothing_to_accelerate(data: dict[str, Any]) -> None:
    changed, added = accelerated(data)
    assert added == []
    assert wires(changed) == wires(data)


def test_the_pair_of_before_is_taken_out_whole() -> None:
    data = drawn({**PLAIN, "unet": "TRTUNetEngine", "patch": "TRTSamplerPatch"},
                 "load.0 unet.0, load.0 patch.0, unet.0 patch.1, patch.0 s.0")
    assert len(remove(Workflow(data))) == 1
    assert [node["type"] for node in data["nodes"]] == ["Loader", "Sampler"]
    assert to_prompt(data, OBJECT_INFO)["2"]["inputs"] == {"MODEL": ["1", 0]}


@pytest.mark.fault("a Get node lies in a subgraph with inputs, its Set node outside", see="the prompt has its wire")
def test_a_get_in_a_subgraph_with_inputs_finds_its_set_outside() -> None:
    inside = subgraph({"get": "GetNode|m", "s": "Sampler", "decode": "Decode"}, "get.0 s.0, in.0 decode.0", "VAE")
    data = drawn({"load": "Loader", "set": "SetNode|m", "sub": "G"}, "load.0 set.0, load.2 sub.0", {"G": inside})
    sampler = next(entry for entry in to_prompt(data, OBJECT_INFO).values() if entry["class_type"] == "Sampler")
    assert sampler["inputs"] == {"MODEL": ["1", 0]}


def test_native_reroutes_stay_on_the_links_behind_the_node() -> None:
    data = drawn(PLAIN, "load.0 s.0")
    reroutes = [{"id": 1, "pos": [220, 50], "linkIds": [1]}]
    data["extra"] = {"reroutes": reroutes, "linkExtensions": [{"id": 1, "parentId": 1}]}
    changed, _ = accelerated(data)
    by_id = {link[0]: link for link in changed["links"]}
    assert by_id[1][3:5] == data["links"][0][3:5]
    assert changed["extra"]["reroutes"][0]["pos"][0] > 220
    inner = drawn({"sub": "P", "load": "Loader"}, "load.0 sub.0", {"P": copy.deepcopy(SAMPLED)})
    inner["definitions"]["subgraphs"][0]["links"][0]["parentId"] = 7
    assert accelerated(inner)[0]["definitions"]["subgraphs"][0]["links"][0]["parentId"] == 7


def test_what_stands_right_moves_right_and_groups_grow() -> None:
    data = drawn({**LORA, "below": "FreeU"}, "load.0 lora.0, lora.0 s.0")
    data["nodes"][3]["pos"] = [260, 180]  # it reaches into the row, from the left
    data["nodes"][3]["size"] = [400, 100]
    data["groups"] = [{"bounding": [-20, -60, 760, 400]}, {"bounding": [720, -60, 300, 200]}]
    changed, _ = accelerated(data)
    boxes = [(*node["pos"], *node["size"]) for node in changed["nodes"]]
    for i, (x, y, w, h) in enumerate(boxes):
        for u, v, p, q in boxes[i + 1:]:
            assert not (x < u + p and u < x + w and y < v + q and v < y + h), boxes
    node = next(node for node in changed["nodes"] if node["type"] == "TRTAccelerate")
    whole, right = (group["bounding"] for group in changed["groups"])
    assert whole[0] + whole[2] > node["pos"][0] + node["size"][0]
    assert whole[1] + whole[3] > node["pos"][1] + node["size"][1]
    assert right[0] > node["pos"][0] + node["size"][0]


TWO = {"vae": "VAELoader", "load": "Loader", "lora": "LoraLoader", "s": "Refine", "one": "DecodeLatent",
       "other": "Loader", "t": "Refine", "two": "DecodeLatent"}  # fmt: skip
BRANCHES = "load.0 lora.0, lora.0 s.0, s.0 one.0, vae.0 one.1, other.0 t.0, t.0 two.0, vae.0 two.1"


@pytest.mark.fault("a user mutes one of two branches that share a VAE or a ControlNet",
                   see="nothing: the other runs on its own engines")
@pytest.mark.parametrize("api", [False, True], ids=["UI", "API"])
@pytest.mark.parametrize(("more", "wired", "ways"), [
    ({}, "", {"one": "lora", "two": "other"}),
    ({"image": "Encode"}, "vae.0 image.0, image.0 s.1, image.0 t.1", {"one": "lora", "two": "other", "image": None}),
    ({"image": "Encode"}, "vae.0 image.0, image.0 t.1", {"one": "lora", "two": "other", "image": "other"}),
    ({"image": "Encode"}, "vae.0 image.0", {"one": "lora", "two": "other", "image": None}),
    ({}, "s.0 t.1", {"one": "lora", "two": "other"}),
    ({"image": "Encode", "again": "Encode"}, "vae.0 image.0, image.0 s.1, s.0 t.1", {"one": "lora", "image": "lora"}),
], ids=["shared", "an image for both", "an image for one", "an image for none", "one behind the other",
        "an image for both in a row"])  # fmt: skip
def test_a_vae_of_two_branches_goes_through_the_node_of_each(
    more: dict[str, str], wired: str, ways: dict[str, str | None], api: bool
) -> None:
    data = drawn({**TWO, **more}, ", ".join(filter(None, (BRANCHES, wired))))
    prompt, titles = to_prompt(data, OBJECT_INFO), {node["title"]: str(node["id"]) for node in data["nodes"]}
    if api:
        assert len(change_prompt(prompt, OBJECT_INFO, accelerate)) == 2
    else:
        changed, added = accelerated(data)
        assert added == ["TRTAccelerate"] * 2
        assert accelerated(changed)[1] == []
        prompt = to_prompt(changed, OBJECT_INFO)
        assert restored(changed, data)
    found = {}
    for title in ways:
        node = prompt[prompt[titles[title]]["inputs"]["VAE"][0]]["inputs"]
        found[title] = next((name for name, number in titles.items() if node.get("model") == [number, 0]), None)
    assert found == ways


@pytest.mark.parametrize(("wired", "nodes"), [
    ("net.0 apply.0, apply.0 s.1, apply.0 t.1", ["TRTAccelerate", "TRTAccelerate", "TRTControlNetEngine"]),
    ("net.0 apply.0, apply.0 t.1", ["TRTAccelerate"] * 2),
    ("net.0 apply.0, apply.0 s.1, apply.0 t.1, s.0 t.2", ["TRTAccelerate"] * 2),
    ("net.0 apply.0, apply.0 t.1, net.0 more.0, more.0 s.1", ["TRTAccelerate"] * 2),
], ids=["both", "one", "one behind the other", "each its own"])
def test_a_controlnet_of_two_branches_gets_a_node_of_its_own(wired: str, nodes: list[str]) -> None:
    data = drawn({"load": "Loader", "s": "Control", "other": "Loader", "t": "Control", "net": "ControlNetLoader",
                  "apply": "Apply", "more": "Apply"}, f"load.0 s.0, other.0 t.0, {wired}")  # fmt: skip
    changed, added = accelerated(data)
    assert added == nodes
    graph = Workflow(changed).root
    types = {number: node["type"] for number, node in graph.nodes.items()}
    for link in graph.links.values():
        if types[link.target] == "Apply" and types[link.origin] == "TRTAccelerate":
            samplers = [number for number in graph.needing(link.target) if types[number] == "Control"]
            assert all(graph.depends_on(number, link.origin) for number in samplers)
    assert restored(changed, data)


@pytest.mark.parametrize("api", [False, True], ids=["UI", "API"])
@pytest.mark.parametrize(("file", "taken"), [
    ("sdxl_vae.safetensors", True), ("ae.safetensors", True), ("flux2-vae.safetensors", True), ("swan.pt", True),
    ("wan_2.1_vae.safetensors", True), ("Wan2.2_VAE.pth", True), ("sub/qwen_image_vae.safetensors", True),
    ("qwen_image_2.1_vae.safetensors", True), ("taew2_1.safetensors", False),
    ("minimax_h3_video_vae.safetensors", True), ("minimax_h3_audio_vae.safetensors", False),
    ("LTX23_video_vae_bf16.safetensors", True),
    ("hunyuan_video_vae_bf16.safetensors", False), ("audio", False), ("hunyuanvideo15_vae_fp16.safetensors", True),
    ("hunyuan_image_2.1_vae_fp16.safetensors", True), ("hunyuan_image_refiner_vae_fp16.safetensors", False),
])  # fmt: skip
def test_a_vae_that_no_engine_serves_gets_no_wire(file: str, taken: bool, api: bool) -> None:
    kind = "LTXVAudioVAELoader" if file == "audio" else f"VAELoader|{file}"
    data = drawn({**PLAIN, "vae": kind, "decode": "Decode"}, "load.0 s.0, vae.0 decode.0")
    if api:
        prompt = to_prompt(data, OBJECT_INFO)
        prompt["3"]["inputs"]["vae_name"] = file
        assert len(change_prompt(prompt, OBJECT_INFO, accelerate)) == 1
        assert (prompt["4"]["inputs"]["VAE"] != ["3", 0]) is taken
        return
    changed, added = accelerated(data)
    assert added == ["TRTAccelerate"]
    assert any(link[4] == 1 and link[3] == changed["nodes"][-1]["id"] for link in changed["links"]) is taken
