"""Workflows in UI format from a few words: nodes by name and type, wires by names, subgraphs inside."""

from __future__ import annotations

import copy
from typing import Any

from hybrid_trt.saved_workflows.accelerate import accelerate, remove
from hybrid_trt.saved_workflows.graph import Workflow

ACCELERATED = ["vae:VAE", *(f"control_net_{n}:CONTROL_NET" for n in (1, 2, 3, 4))]
#: Inputs and outputs of node types, as types; with a name where it is not the type.
TYPES: dict[str, tuple[list[str], list[str]]] = {
    "Loader": ([], ["MODEL", "CLIP", "VAE"]),
    "LoraLoader": (["MODEL", "CLIP"], ["MODEL", "CLIP"]),
    "ModelMergeSimple": (["model1:MODEL", "model2:MODEL"], ["MODEL"]),
    "FreeU": (["MODEL"], ["MODEL"]),
    "ZImageFunControlnet": (["MODEL", "MODEL_PATCH", "VAE", "IMAGE"], ["MODEL"]),
    "AnimaLLLiteApply": (["MODEL", "MODEL_PATCH", "IMAGE"], ["MODEL"]),
    "ModelPatchLoader": ([], ["MODEL_PATCH"]),
    "PatchFromImage": (["MODEL", "IMAGE"], ["MODEL"]),
    "Sampler": (["MODEL"], ["LATENT"]),
    "TRTStream": (["MODEL"], ["IMAGE"]),
    "Scheduler": (["MODEL"], ["SIGMAS"]),
    "ModelSave": (["MODEL"], []),
    "ControlNetLoader": ([], ["CONTROL_NET"]),
    "DiffControlNetLoader": (["MODEL"], ["CONTROL_NET"]),
    "Apply": (["CONTROL_NET"], ["CONDITIONING"]),
    "Decode": (["VAE"], ["IMAGE"]),
    "DecodeLatent": (["LATENT", "VAE"], ["IMAGE"]),
    "Encode": (["VAE"], ["LATENT"]),
    "Refine": (["MODEL", "LATENT"], ["LATENT"]),
    "Control": (["MODEL", "CONDITIONING", "LATENT"], ["LATENT"]),
    "VAELoader": ([], ["VAE"]),
    "LTXVAudioVAELoader": ([], ["VAE"]),
    "Reroute": (["*"], ["*"]),
    "Reroute (rgthree)": (["*"], ["*"]),
    "Any Switch (rgthree)": (["any_01:*", "any_02:*"], ["*"]),
    "SetNode": (["*"], ["*"]),
    "GetNode": ([], ["*"]),
    "ToPipe": (["MODEL", "VAE"], ["PIPE"]),
    "FromPipe": (["PIPE"], ["MODEL", "VAE"]),
    "PipeLoader": ([], ["PIPE"]),
    "Context": (["PIPE", "MODEL"], ["PIPE", "MODEL"]),
    "Anything Everywhere": (["anything:*"], []),
    "TRTAccelerate": (["model:MODEL", *ACCELERATED], ["model:MODEL", *ACCELERATED]),
    "TRTControlNetEngine": (["control_net:CONTROL_NET"], ["control_net:CONTROL_NET"]),
    "TRTUNetEngine": (["model:MODEL"], ["TRT_ENGINE"]),
    "TRTSamplerPatch": (["model:MODEL", "engine:TRT_ENGINE"], ["model:MODEL"]),
}
OBJECT_INFO = {
    kind: {"input": {"required": {word.split(":")[0]: [word.split(":")[-1]] for word in inputs}},
           "output": [word.split(":")[-1] for word in outputs]}
    for kind, (inputs, outputs) in TYPES.items() if kind not in ("Reroute", "Reroute (rgthree)", "SetNode", "GetNode")
}
MODES = {"muted": 2, "bypassed": 4}


def drawn(nodes: dict[str, str], wires: str, inside: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a workflow.

    Args:
        nodes: name -> type, or the name of a subgraph; "muted" or "bypassed" and a name of Get/Set may follow.
        wires: "loader.0 lora.0" with commas between; "in" and "out" are the subgraph's own.
        inside: name of a subgraph -> what this function made for it, with ``inputs`` and ``outputs`` as types.
    """
    data = {"version": 0.4, "nodes": [], "links": [], "groups": [], "last_node_id": 0, "last_link_id": 0, **more}
    inside = inside or {}
    if inside:
        data["definitions"] = {"subgraphs": [{**one, "id": name} for name, one in inside.items()]}
    ids = {name: number for number, name in enumerate(nodes, 100 * len(more) + 1)} | {"in": -10, "out": -20}
    for name, words in nodes.items():
        kind, mode, setting = _read(words)
        inputs, outputs = TYPES.get(kind) or [[f"{one['name']}:{one['type']}" for one in inside[kind][side]]
                                              for side in ("inputs", "outputs")]
        data["nodes"].append({
            "id": ids[name], "title": name, "type": kind, "mode": mode,
            "pos": [250 * len(data["nodes"]), 0], "size": [200, 100],
            "inputs": [_socket(word, link=None) for word in inputs],
            "outputs": [_socket(word, links=[]) for word in outputs], "widgets_values": [setting],
        })
    made = {node["title"]: node for node in data["nodes"]}
    for number, wire in enumerate(filter(None, (one.strip() for one in wires.split(","))), 100 * len(more) + 1):
        (origin, slot), (target, into) = (end.split(".") for end in wire.split())
        saved = [number, ids[origin], int(slot), ids[target], int(into), "*"]
        names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        data["links"].append(dict(zip(names, saved, strict=True)) if more else saved)
        begins = made[origin]["outputs"][int(slot)]["links"] if origin in made else data["inputs"][int(slot)]["linkIds"]
        begins.append(number)
        if target in made:
            made[target]["inputs"][int(into)]["link"] = number
        else:
            data["outputs"][int(into)]["linkIds"].append(number)
    data["last_node_id"], data["last_link_id"] = max(ids.values()), len(data["links"])
    return data


def subgraph(nodes: dict[str, str], wires: str, inputs: str = "", outputs: str = "", **more: Any) -> dict[str, Any]:
    """Return the inside of a subgraph; its inputs and outputs are types with spaces between."""
    sides = {"inputs": inputs, "outputs": outputs}
    sockets = {side: [{"name": f"{kind}_{i}", "type": kind, "linkIds": []} for i, kind in enumerate(kinds.split())]
               for side, kinds in sides.items()}
    ends = {"inputNode": {"id": -10, "bounding": [-200, 0, 120, 60]},
            "outputNode": {"id": -20, "bounding": [900, 0, 120, 60]}}
    return drawn(nodes, wires, **more, **sockets, **ends)


def wires(data: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the links of all graphs by the graph's name, without what stands where."""
    graphs = {"": data} | {one["id"]: one for one in data.get("definitions", {}).get("subgraphs", [])}
    links = {name: [list(link.values()) if isinstance(link, dict) else link for link in one["links"]]
             for name, one in graphs.items()}
    return {name: sorted([str(end) for end in link[:5]] for link in found) for name, found in links.items()}


def accelerated(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return an accelerated copy, and the types of the nodes that were added."""
    changed = copy.deepcopy(data)
    return changed, [node["type"] for node in accelerate(Workflow(changed))]


def restored(changed: dict[str, Any], data: dict[str, Any]) -> bool:
    """Take acceleration out again; tell whether the workflow is wired as before, and a second press adds nothing."""
    again = accelerated(changed)[1]
    remove(Workflow(changed))
    return again == [] and wires(changed) == wires(data)


def _read(words: str) -> tuple[str, int, str]:
    kind, *rest = words.split("|")
    mode = next((MODES[word] for word in rest if word in MODES), 0)
    return kind, mode, next((word for word in rest if word not in MODES), "")


def _socket(word: str, **link: Any) -> dict[str, Any]:
    name, _, kind = word.rpartition(":")
    return {"name": name or kind, "type": kind, **link}
