"""The shipped blueprints: whole workflows as one node, which ComfyUI lists in its node library.

They are built in ComfyUI's page as its own *Convert to subgraph* does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workflow_families import FLUX1, ZIMAGE, Transformer
from workflow_parts import Recipe
from workflow_transformers import text_to_image

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


def accelerated(name: str, family: Transformer) -> Blueprint:
    """A prompt in, a picture out: the workflow of a family without what tells of it and keeps the picture."""
    whole, left = text_to_image(name, family, ""), {"note", "report", "ran", "save"}
    nodes = {key: entry for key, entry in whole.nodes.items() if key not in left}
    groups = [one | {"columns": [[key for key in column if key in nodes] for column in one["columns"]]}
              for one in whole.groups]  # fmt: skip
    shown = {"prompt": "positive.text", "model": "model.unet_name", "guidance": "guidance.guidance",
             "width": "latent.width", "height": "latent.height", "steps": "sampler.steps", "seed": "sampler.seed"}
    return Blueprint(
        Recipe(name, f"{family.title} text to image, accelerated", nodes, groups),
        f"Makes a picture from a prompt with {family.title}, on compiled engines.",
        {shown_as: target for shown_as, target in shown.items() if target.split(".")[0] in nodes})


BLUEPRINTS = (accelerated("blueprint_zimage", ZIMAGE), accelerated("blueprint_flux1", FLUX1))
