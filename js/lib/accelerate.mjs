// "Accelerate this workflow": puts TRT Accelerate behind each model loader and its LoRAs, and takes ControlNets and VAEs
// through it. "Remove acceleration" wires what was before. Works on LiteGraph's graphs, subgraphs included.

import { ACCELERATE } from "./graph.mjs";

const CONTROL_ENGINE = "TRTControlNetEngine", SAMPLER_PATCH = "TRTSamplerPatch", UNET_ENGINE = "TRTUNetEngine";
/** Output number -> input name of our nodes that hand on what they get. */
const PASSES_ON = {
    [ACCELERATE]: ["model", "vae", "control_net_1", "control_net_2", "control_net_3", "control_net_4"],
    [CONTROL_ENGINE]: ["control_net"], [SAMPLER_PATCH]: ["model"],
};
const GAP = 50, WIDTH = 330;

/** @typedef {{node: any, slot: number}} Output */

/**
 * Put acceleration into a workflow.
 * @param {any} root the outermost graph
 * @param {(type: string) => any} create makes a node
 * @returns {any[]} the nodes that were added; none where there is nothing to accelerate
 */
export function accelerate(root, create) {
    return graphsOf(root).flatMap((graph) => {
        const added = modelsOf(graph).map((output) => insert(graph, output, create(ACCELERATE), "model", 0));
        for (const output of sourcesOf(graph, "CONTROL_NET")) addControlNet(graph, output, added, create);
        for (const output of sourcesOf(graph, "VAE")) {
            const free = added.find((node) => canTake(graph, node, "vae", output));
            if (free) through(graph, output, free, "vae", 1);
        }
        return added;
    });
}

/**
 * Take our nodes out again and wire what was before.
 * @param {any} root the outermost graph
 * @returns {number} how many nodes were taken out
 */
export function removeAcceleration(root) {
    let count = 0;
    for (const graph of graphsOf(root)) for (const node of [...graph.nodes]) {
        const names = PASSES_ON[typeOf(node)];
        if (!names) continue;
        names.forEach((name, slot) => {
            const before = originOf(graph, node, name);
            for (const link of linksOf(graph, { node, slot })) if (before) connect(graph, before, link);
        });
        graph.remove(node);
        count += 1;
    }
    if (count) for (const graph of graphsOf(root)) for (const node of [...graph.nodes])
        if (typeOf(node) === UNET_ENGINE && !linksOf(graph, { node, slot: 0 }).length) graph.remove(node); // served a patch
    return count;
}

/** The graph and all of its subgraphs, each once. */
function graphsOf(root) {
    const found = new Set([root]);
    for (const graph of found) for (const node of graph.nodes ?? []) if (node.isSubgraphNode?.()) found.add(node.subgraph);
    return [...found];
}

const typeOf = (node) => node.comfyClass ?? node.type;
const isOurs = (node) => /^TRT/.test(typeOf(node) ?? "");
const has = (slots, type) => (slots ?? []).some((slot) => slot.type === type);
const isLora = (node) => /lora/i.test(typeOf(node) ?? "") && has(node.inputs, "MODEL") && has(node.outputs, "MODEL");

/** The outputs of a type by nodes that take none: loaders. A subgraph's loaders are found inside it. */
function sourcesOf(graph, type) {
    const loaders = graph.nodes.filter((node) => !node.isVirtualNode && !node.isSubgraphNode?.() && !isOurs(node) && !has(node.inputs, type));
    return loaders.flatMap((node) => (node.outputs ?? []).flatMap((output, slot) => (output.type === type ? [{ node, slot }] : [])))
        .filter((output) => linksOf(graph, output).length);
}

/** The last output of each way from a model loader through LoRAs, where no node of ours follows. */
function modelsOf(graph) {
    const found = [], queue = sourcesOf(graph, "MODEL"), seen = new Set();
    while (queue.length) {
        const { node, slot } = queue.shift();
        if (seen.has(node)) continue;
        seen.add(node);
        const readers = linksOf(graph, { node, slot }).map((link) => graph.getNodeById(link.target_id));
        for (const lora of readers.filter((reader) => reader && isLora(reader)))
            queue.push({ node: lora, slot: lora.outputs.findIndex(({ type }) => type === "MODEL") });
        const others = readers.filter((reader) => !reader || !isLora(reader));
        if (others.length && !others.some((reader) => reader && isOurs(reader))) found.push({ node, slot });
    }
    return found;
}

function addControlNet(graph, output, added, create) {
    if (linksOf(graph, output).some(({ target_id: id }) => [ACCELERATE, CONTROL_ENGINE].includes(typeOf(graph.getNodeById(id) ?? {})))) return;
    for (const node of added) for (let number = 1; number <= 4; number += 1) if (canTake(graph, node, `control_net_${number}`, output)) {
        through(graph, output, node, `control_net_${number}`, number + 1);
        return;
    }
    added.push(insert(graph, output, create(CONTROL_ENGINE), "control_net", 0));
}

/** Whether an input of a node is free and would not make the node depend on itself. */
function canTake(graph, node, name, { node: source }) {
    const input = (node.inputs ?? []).find((one) => one.name === name);
    return Boolean(input) && input.link == null && !dependsOn(graph, source, node);
}

function dependsOn(graph, node, other) {
    const queue = [node], seen = new Set();
    while (queue.length) {
        const current = queue.pop();
        if (current === other) return true;
        if (!current || seen.has(current)) continue;
        seen.add(current);
        for (const { link } of current.inputs ?? []) if (link != null) queue.push(graph.getNodeById(graph.getLink(link)?.origin_id));
    }
    return false;
}

/** Add a node right of an output's node, in the place of what read the output; what stands there moves right. */
function insert(graph, output, node, name, slot) {
    const { pos: [left, y], size: [width] } = output.node, from = left + width;
    graph.add(node);
    node.size[0] = Math.max(node.size[0], WIDTH);
    const rowOf = (one) => one !== node && one.pos[0] < from && one.pos[1] - GAP < y + node.size[1] && one.pos[1] + one.size[1] > y - GAP;
    const x = Math.max(from, ...graph.nodes.filter(rowOf).map((one) => one.pos[0] + one.size[0])) + GAP;
    makeRoom(graph, from, x + node.size[0] - from, node);
    node.pos = [x, y];
    through(graph, output, node, name, slot);
    return node;
}

function makeRoom(graph, from, width, added) {
    for (const one of [...graph.nodes, ...(graph.reroutes?.values() ?? [])])
        if (one !== added && one.pos[0] >= from - 1) one.pos = [one.pos[0] + width, one.pos[1]];
    for (const group of graph.groups ?? []) {
        const [left, right] = [group.pos[0], group.pos[0] + group.size[0]];
        if (left >= from - 1) group.pos = [left + width, group.pos[1]];
        else if (right > from) group.size = [group.size[0] + width, group.size[1]];
    }
}

/** Wire an output through a node: what read the output reads the node's from then on. LoRAs stay before it. */
function through(graph, output, node, name, slot) {
    const readers = linksOf(graph, output).filter(({ target_id: id }) => {
        const reader = graph.getNodeById(id);
        return !reader || !(isLora(reader) || typeOf(reader) === ACCELERATE);
    });
    output.node.connect(output.slot, node, node.inputs.findIndex((input) => input.name === name));
    for (const link of readers) connect(graph, { node, slot }, link);
}

/** Let what a link leads to read another output, or an input of the subgraph; it may be an output of the subgraph. */
function connect(graph, { node, slot, outside }, { target_id: id, target_slot: targetSlot }) {
    const reader = graph.getNodeById(id);
    if (reader && outside) outside.connect(reader.inputs[targetSlot], reader);
    else if (reader) node.connect(slot, reader, targetSlot);
    else if (!outside) graph.outputNode?.slots[targetSlot]?.connect(node.outputs[slot], node);
}

/** What is wired to an input of a node: an output of another one, or an input of the subgraph (`outside`). */
function originOf(graph, node, name) {
    const input = (node.inputs ?? []).find((one) => one.name === name), link = input?.link != null ? graph.getLink(input.link) : null;
    if (!link) return null;
    const origin = graph.getNodeById(link.origin_id), outside = origin ? null : graph.inputNode?.slots[link.origin_slot];
    return origin || outside ? { node: origin, slot: link.origin_slot, outside } : null;
}

/** The links of an output, as plain values: connecting changes the real ones. */
function linksOf(graph, { node, slot }) {
    return [...(node.outputs?.[slot]?.links ?? [])].map((id) => graph.getLink(id)).filter(Boolean)
        .map(({ target_id, target_slot }) => ({ target_id, target_slot }));
}
