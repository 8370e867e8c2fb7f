import assert from "node:assert/strict";
import { test } from "node:test";
import { accelerate, removeAcceleration } from "../../js/lib/accelerate.mjs";

/** Inputs and outputs of node types by their types; a name where it is not the type. */
const TYPES = {
    Loader: [[], ["MODEL", "CLIP", "VAE"]], LoraLoader: [["MODEL", "CLIP"], ["MODEL", "CLIP"]], FreeU: [["MODEL"], ["MODEL"]],
    Sampler: [["MODEL"], ["LATENT"]], ControlNetLoader: [[], ["CONTROL_NET"]], DiffControlNetLoader: [["MODEL"], ["CONTROL_NET"]],
    Apply: [["CONTROL_NET"], []], Decode: [["VAE"], []],
    TRTAccelerate: [["model:MODEL", "vae:VAE", ...[1, 2, 3, 4].map((n) => `control_net_${n}:CONTROL_NET`)], ["MODEL", "VAE", ...Array(4).fill("CONTROL_NET")]],
    TRTControlNetEngine: [["control_net:CONTROL_NET"], ["CONTROL_NET"]],
};
const slots = (kinds) => kinds.map((kind) => { const [name, type = name] = kind.split(":"); return { name, type }; });

class Graph {
    constructor() { Object.assign(this, { nodes: [], links: new Map(), groups: [], count: 0, outside: [] }); }
    make(type) {
        const [inputs, outputs] = TYPES[type].map(slots);
        return { comfyClass: type, pos: [0, 0], size: [200, 100], inputs: inputs.map((one) => ({ ...one, link: null })),
            outputs: outputs.map((one) => ({ ...one, links: [] })) };
    }
    add(node) {
        node.id = String(this.nodes.push(node));
        node.connect = (slot, target, targetSlot) => this.connect(node, slot, target, targetSlot);
        return node;
    }
    node(type, x = 0, y = 0) { return Object.assign(this.add(this.make(type)), { pos: [x, y] }); }
    getNodeById(id) { return this.nodes.find((node) => node.id === id) ?? null; }
    getLink(id) { return this.links.get(id); }
    connect(node, slot, target, targetSlot) {
        this.cut(target.inputs[targetSlot]);
        const id = ++this.count;
        this.links.set(id, { origin_id: node.id, origin_slot: slot, target_id: target.id, target_slot: targetSlot });
        node.outputs[slot].links.push(id);
        target.inputs[targetSlot].link = id;
    }
    cut(input) {
        for (const { outputs } of this.nodes) for (const output of outputs) output.links = output.links.filter((id) => id !== input.link);
        this.links.delete(input.link);
        input.link = null;
    }
    remove(node) {
        for (const input of node.inputs) this.cut(input);
        for (const id of node.outputs.flatMap(({ links }) => [...links])) {
            const link = this.links.get(id);
            this.cut(this.getNodeById(link.target_id).inputs[link.target_slot]);
        }
        this.nodes = this.nodes.filter((one) => one !== node);
    }
    /** Who reads whom, in words. */
    get wires() {
        const name = (id) => { const node = this.getNodeById(id); return `${node.comfyClass}${node.id}`; };
        return [...this.links.values()].map((l) => `${name(l.origin_id)}.${l.origin_slot} > ${name(l.target_id)}.${l.target_slot}`).sort();
    }
}

const on = (graph) => accelerate(graph, (type) => graph.make(type));

test("a model goes through the node behind its LoRAs, and before what changes the network", () => {
    const graph = new Graph(), loader = graph.node("Loader"), lora = graph.node("LoraLoader", 250), freeu = graph.node("FreeU", 500), sampler = graph.node("Sampler", 750);
    loader.connect(0, lora, 0);
    loader.connect(1, lora, 1);
    lora.connect(0, freeu, 0);
    freeu.connect(0, sampler, 0);
    const before = graph.wires;
    const [added, ...more] = on(graph);
    assert.equal(more.length, 0);
    assert.deepEqual(graph.wires.filter((wire) => wire.includes("TRT")), [`LoraLoader2.0 > TRTAccelerate${added.id}.0`, `TRTAccelerate${added.id}.0 > FreeU3.0`]);
    assert.ok(added.pos[0] > lora.pos[0] + lora.size[0] && freeu.pos[0] > added.pos[0] + added.size[0], "what stood there moved right");
    assert.deepEqual(on(graph), [], "once is enough");
    assert.equal(removeAcceleration(graph), 1);
    assert.deepEqual(graph.wires, before);
});

test("a model with and without a LoRA gets a node for each", () => {
    const graph = new Graph(), loader = graph.node("Loader"), lora = graph.node("LoraLoader"), plain = graph.node("Sampler"), styled = graph.node("Sampler");
    loader.connect(0, lora, 0);
    loader.connect(0, plain, 0);
    lora.connect(0, styled, 0);
    assert.equal(on(graph).length, 2);
    assert.ok(graph.wires.includes("Loader1.0 > LoraLoader2.0"), "LoRAs stay before the node");
});

test("four ControlNets and the VAE go through it, the fifth gets a node of its own", () => {
    const graph = new Graph(), loader = graph.node("Loader"), sampler = graph.node("Sampler"), decode = graph.node("Decode");
    loader.connect(0, sampler, 0);
    loader.connect(2, decode, 0);
    for (let i = 0; i < 5; i += 1) graph.node("ControlNetLoader").connect(0, graph.node("Apply"), 0);
    const [node, single] = on(graph);
    assert.deepEqual([node.comfyClass, single.comfyClass], ["TRTAccelerate", "TRTControlNetEngine"]);
    assert.ok(node.inputs.every(({ link }) => link !== null));
    assert.deepEqual(node.outputs.map(({ links }) => links.length), [1, 1, 1, 1, 1, 1]);
    assert.equal(removeAcceleration(graph), 2);
    assert.ok(graph.wires.every((wire) => !wire.includes("TRT")));
});

test("a ControlNet that is made from the accelerated model never goes back into its node", () => {
    const graph = new Graph(), loader = graph.node("Loader"), sampler = graph.node("Sampler"), net = graph.node("DiffControlNetLoader"), apply = graph.node("Apply");
    loader.connect(0, sampler, 0);
    loader.connect(0, net, 0);
    net.connect(0, apply, 0);
    const [node, single] = on(graph);
    assert.equal(node.inputs[2].link, null);
    assert.equal(single.comfyClass, "TRTControlNetEngine");
});

test("a workflow without a model is left as it is", () => {
    const graph = new Graph();
    graph.node("Loader"); // which nobody reads
    assert.deepEqual(on(graph), []);
    assert.equal(graph.nodes.length, 1);
});
