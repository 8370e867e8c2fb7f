// Finding engine nodes in the graph, subgraphs included, and cutting a prompt down to what a build needs.

import { ENGINE_NODES, REPORT } from "./node_names.mjs";

export const REPORT_ID = "hybrid_trt_build";

/**
 * Every engine node of a graph with the ids that prompts give it: "5", or "2:5" inside the subgraph node 2.
 * @param {{nodes: any[]}} graph the root graph
 * @returns {{node: any, ids: string[]}[]} a node of a subgraph that is used twice has two ids
 */
export function engineNodes(graph) {
    /** @type {Map<any, string[]>} */
    const found = new Map();
    const visit = (current, prefix, path) => {
        for (const node of current?.nodes ?? []) {
            if (ENGINE_NODES.includes(node.comfyClass ?? node.type)) {
                found.set(node, [...(found.get(node) ?? []), `${prefix}${node.id}`]);
            } else if (node.isSubgraphNode?.() && !path.includes(node.subgraph)) {
                visit(node.subgraph, `${prefix}${node.id}:`, [...path, node.subgraph]);
            }
        }
    };
    visit(graph, "", []);
    return [...found].map(([node, ids]) => ({ node, ids }));
}

/** Whether an input of a prompt is another node's output. */
export const isLink = (value) => Array.isArray(value) && value.length === 2;

/**
 * The ids of a prompt's nodes that some depend on, themselves included.
 * @param {Record<string, {inputs: Record<string, unknown>}>} prompt
 * @param {string[]} ids
 * @returns {Set<string>}
 */
export function upstreamOf(prompt, ids) {
    const found = new Set(), queue = [...ids];
    while (queue.length) {
        const id = queue.pop();
        if (!prompt[id] || found.has(id)) continue;
        found.add(id);
        for (const value of Object.values(prompt[id].inputs)) if (isLink(value)) queue.push(String(value[0]));
    }
    return found;
}

/**
 * The part of an API prompt that some nodes depend on, themselves included.
 * @param {Record<string, any>} prompt
 * @param {string[]} ids
 * @returns {Record<string, any>} without the nodes' titles
 */
export function ancestors(prompt, ids) {
    return Object.fromEntries([...upstreamOf(prompt, ids)].map((id) =>
        [id, { class_type: prompt[id].class_type, inputs: prompt[id].inputs }]));
}

/**
 * A prompt that does no more than order the builds of some engine nodes.
 * @param {Record<string, any>} prompt the whole graph's API prompt
 * @param {string[]} ids the engine nodes' ids in it
 * @returns {Record<string, any> | null} null when none of them is in the prompt (muted or bypassed)
 */
export function buildPrompt(prompt, ids) {
    const there = ids.filter((id) => prompt[id]);
    if (!there.length) return null;
    const part = ancestors(prompt, there);
    for (const [i, id] of there.entries()) {
        const { class_type, inputs } = part[id];
        part[id] = { class_type, inputs: { ...inputs, when_missing: "build in background" } };
        // each needs an output node behind it: this one takes anything
        part[i ? `${REPORT_ID}_${i}` : REPORT_ID] = { class_type: REPORT, inputs: { after: [id, 0] } };
    }
    return part;
}

/** Whether another pack may wire nodes of a graph while ComfyUI queues, and only then: such nodes are known by their names. */
export function isWiredLater(graph) {
    return Boolean(graph?.nodes?.some(({ type }) => /everywhere/i.test(type)));
}

/**
 * Whether the model input of an engine node is connected.
 * @param {{inputs?: {link: unknown}[]}} node
 */
export function isWired(node) {
    return node.inputs?.[0]?.link != null;
}
