"""The shipped blueprints: whole workflows as one node, which ComfyUI lists in its node library.

They are built in ComfyUI's page as its own *Convert to subgraph* does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workflow_parts import (
    CONTROLS,
    ENGINES,
    MODELS,
    SAMPLE,
    SD15,
    Nodes,
    Recipe,
    accelerate,
    apply,
    group,
    latent,
    loaders,
    node,
    prompts,
    recipe,
    sampler,
)

RESULT = "decode"
"""The node whose first output is the blueprint's."""
#: Makes one node of all that is in the graph, with inputs of its own, and returns it as the page publishes it.
INTO_ONE = """async ({ title, words, shown, links, result }) => {
    const made = app.graph.convertToSubgraph(new Set([...app.graph.nodes, ...app.graph.groups]));
    const { subgraph, node } = made;
    node.title = subgraph.name = title;
    subgraph.description = words;
    for (const input of [...subgraph.inputs]) subgraph.removeInput(input);  // the page showed some by itself
    const input = (id, name) => {
        const inner = subgraph.getNodeById(id), at = inner.inputs.findIndex(one => one.name === name);
        if (at < 0) throw new Error(`${title}: node ${id} has no input ${name}`);
        return [inner, at]; };
    for (const one of subgraph.nodes) one.inputs.forEach((_, at) => one.disconnectInput(at));
    for (const [from, output, to, name] of links) {  // in a copy of rows some are elsewhere
        const origin = subgraph.getNodeById(from), [inner, at] = input(to, name);
        const slot = origin.outputs.findIndex(o => [o.name, o.label, o.localized_name].includes(output));
        origin.connect(slot, inner, at);
    }
    for (const [name, id, widget] of shown) {
        const [inner, at] = input(id, widget);
        subgraph.addInput(name, String(inner.inputs[at].type)).connect(inner.inputs[at], inner);
    }
    const last = subgraph.getNodeById(result);
    subgraph.addOutput(last.outputs[0].name, last.outputs[0].type).connect(last.outputs[0], last);
    await new Promise(done => setTimeout(done, 500));
    node.pos = [0, 0];
    node.setSize([360, node.computeSize()[1]]);
    const { nodes, definitions } = JSON.parse(JSON.stringify((await app.graphToPrompt()).workflow));
    return { revision: 0, last_node_id: nodes[0].id, last_link_id: 0, nodes, links: [], definitions, version: 0.4 };
}"""


@dataclass(frozen=True)
class Blueprint:
    """One blueprint.

    Attributes:
        recipe: what is inside; its title is the file's name, and the node's.
        words: what it does.
        shown: names of the node's inputs, each with the inner input as "key.input".
    """

    recipe: Recipe
    words: str
    shown: dict[str, str]

    def for_page(self) -> dict[str, Any]:
        """Return the data with which the page makes one node of it."""
        numbers = {key: number for number, key in enumerate(self.recipe.nodes, start=1)}
        shown = [(name, *target.split(".", 1)) for name, target in self.shown.items()]
        links = [(*source.split("."), key, name) for key, entry in self.recipe.nodes.items()
                 for name, source in entry["inputs"].items()]
        return {"title": self.recipe.title, "words": self.words, "result": numbers[RESULT],
                "shown": [(name, numbers[key], widget) for name, key, widget in shown],
                "links": [(numbers[origin], output, numbers[key], name) for origin, output, key, name in links]}


def text_to_image() -> Blueprint:
    """A prompt in, a picture out."""
    nodes = loaders(SD15) | accelerate() | prompts() | latent(SD15) | {"sampler": sampler("latent.LATENT")} | _decode()
    return Blueprint(
        _named("blueprint_text_to_image", "Text to image, accelerated", nodes, [
            group("Model", MODELS, ["checkpoint"]),
            group("Accelerate", ENGINES, ["accelerate"]),
            group("Prompt", CONTROLS, ["positive", "negative", "latent"]),
            group("Sample", SAMPLE, ["sampler", "decode"]),
        ]),
        "Makes a picture from a prompt with Stable Diffusion, on compiled engines.",
        {"prompt": "positive.text", "negative prompt": "negative.text", "checkpoint": "checkpoint.ckpt_name",
         "width": "latent.width", "height": "latent.height", "steps": "sampler.steps", "seed": "sampler.seed"},
    )


def two_controlnets() -> Blueprint:
    """A prompt and two control images in, a picture out."""
    nodes = loaders(SD15, 2) | accelerate(2) | prompts() | apply(((0.7, 0.0, 1.0), (0.4, 0.0, 1.0))) | latent(SD15)
    nodes["apply"]["inputs"] = {name: source for name, source in nodes["apply"]["inputs"].items()
                                if not source.startswith("image")}
    nodes |= {"sampler": sampler("latent.LATENT", applied=True)} | _decode()
    return Blueprint(
        _named("blueprint_two_controlnets", "Two ControlNets, accelerated", nodes, [
            group("Models", MODELS, ["checkpoint", "net_1", "net_2"]),
            group("Accelerate", ENGINES, ["accelerate"]),
            group("ControlNets", CONTROLS, ["positive", "negative", "apply"]),
            group("Sample", SAMPLE, ["latent", "sampler", "decode"]),
        ]),
        "Makes a picture from a prompt and two control images with Stable Diffusion, on compiled engines.",
        {"image 1": "apply.rows.image_1", "image 2": "apply.rows.image_2", "prompt": "positive.text",
         "negative prompt": "negative.text", "checkpoint": "checkpoint.ckpt_name",
         "ControlNet 1": "net_1.control_net_name", "ControlNet 2": "net_2.control_net_name",
         "strength 1": "apply.rows.strength_1", "strength 2": "apply.rows.strength_2",
         "width": "latent.width", "height": "latent.height", "steps": "sampler.steps", "seed": "sampler.seed"},
    )


def _decode() -> Nodes:
    return {RESULT: node("VAEDecode", None, {}, {"samples": "sampler.LATENT", "vae": "accelerate.vae"}, (300, 0))}


def _named(name: str, title: str, nodes: Nodes, groups: list[dict[str, Any]]) -> Recipe:
    made = recipe(name, SD15, "", nodes, groups)
    return Recipe(name, title, made.nodes, made.groups)


BLUEPRINTS = (text_to_image(), two_controlnets())
