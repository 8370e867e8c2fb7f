import assert from "node:assert/strict";
import { test } from "node:test";
import { ancestors, buildPrompt, engineNodes, isWired } from "../../js/lib/graph.mjs";

const PROMPT = {
    1: { class_type: "CheckpointLoaderSimple", inputs: { ckpt_name: "a" }, _meta: { title: "mine" } },
    2: { class_type: "LoraLoader", inputs: { model: ["1", 0], clip: ["1", 1] } },
    "7:3": { class_type: "TRTUNetEngine", inputs: { model: ["2", 0], when_missing: "use native", max_size: 512 } },
    4: { class_type: "KSampler", inputs: { model: ["1", 0], latent_image: ["5", 0] } },
    5: { class_type: "EmptyLatentImage", inputs: {} },
};

test("engine nodes are found in subgraphs, with the ids that prompts give them", () => {
    const inner = { id: 3, comfyClass: "TRTControlNetEngine" };
    const subgraph = { nodes: [inner] };
    const used = (id) => ({ id, isSubgraphNode: () => true, subgraph });
    const outer = { id: 5, comfyClass: "TRTUNetEngine" };
    const found = engineNodes({ nodes: [outer, { id: 6, comfyClass: "KSampler" }, used(2), used(9)] });
    assert.deepEqual(found, [{ node: outer, ids: ["5"] }, { node: inner, ids: ["2:3", "9:3"] }]);
});

test("a subgraph inside itself is no endless loop, and no graph has no nodes", () => {
    const subgraph = { nodes: [] };
    subgraph.nodes.push({ id: 1, isSubgraphNode: () => true, subgraph });
    assert.deepEqual(engineNodes(subgraph), []);
    assert.deepEqual(engineNodes(undefined), []);
});

test("ancestors are what a node depends on, without titles", () => {
    assert.deepEqual(Object.keys(ancestors(PROMPT, ["7:3"])).sort(), ["1", "2", "7:3"]);
    assert.equal("_meta" in ancestors(PROMPT, ["1"])[1], false);
});

test("a link to a node that is not there, and a loop, end the walk", () => {
    assert.deepEqual(Object.keys(ancestors({ 1: { class_type: "A", inputs: { a: ["2", 0] } } }, ["1"])), ["1"]);
    const loop = { 1: { class_type: "A", inputs: { a: ["2", 0] } }, 2: { class_type: "B", inputs: { b: ["1", 0] } } };
    assert.deepEqual(Object.keys(ancestors(loop, ["1"])).sort(), ["1", "2"]);
});

test("a build's prompt has the node, what it needs and an output, and leaves the graph's prompt alone", () => {
    const before = structuredClone(PROMPT);
    const prompt = buildPrompt(PROMPT, ["7:3"]);
    assert.deepEqual(PROMPT, before);
    assert.deepEqual(Object.keys(prompt).sort(), ["1", "2", "7:3", "hybrid_trt_build"]);
    assert.deepEqual(prompt["7:3"].inputs, { model: ["2", 0], when_missing: "build in background", max_size: 512 });
    assert.deepEqual(prompt.hybrid_trt_build.inputs.after, ["7:3", 0]);
    assert.equal(buildPrompt(PROMPT, ["99"]), null);
});

test("a node without a model is not wired", () => {
    assert.equal(isWired({ inputs: [{ link: 4 }] }), true);
    assert.equal(isWired({ inputs: [{ link: null }] }), false);
    assert.equal(isWired({}), false);
});
