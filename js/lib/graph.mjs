// Finding engine nodes in the graph, subgraphs included, and cutting a prompt down to what a build needs.

export const ENGINE_NODES = ["TRTUNetEngine", "TRTControlNetEngine"];
export const REPORT = "hybrid_trt_build";

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

/**
 * The part of an API prompt that some nodes depend on, themselves included.
 * @param {Record<string, {inputs: Record<string, unknown>}>} prompt
 * @param {string[]} ids
 * @returns {Record<string, any>} without the nodes' titles
 */
export function ancestors(prompt, ids) {
    const kept = {};
    const queue = [...ids];
    while (queue.length) {
        const id = queue.pop();
        const node = prompt[id];
        if (!node || id in kept) continue;
        kept[id] = { class_type: node.class_type, inputs: node.inputs };
        for (const value of Object.values(node.inputs))
            if (Array.isArray(value) && value.length === 2) queue.push(String(value[0]));
    }
    return kept;
}

/**
 * A prompt that does no more than order the build of one engine node.
 * @param {Record<string, any>} prompt the whole graph's API prompt
 * @param {string} id the engine node's id in it
 * @param {string} request a text that no other request has, so that nothing of it is cached
 * @returns {Record<string, any> | null} null when the node is not in the prompt (muted or bypassed)
 */
export function buildPrompt(prompt, id, request) {
    if (!prompt[id]) return null;
    const part = ancestors(prompt, [id]);
    const node = part[id];
    part[id] = { ...node, inputs: { ...node.inputs, when_missing: "build in background", build_request: request } };
    // prompts need an output node: this one takes anything
    part[REPORT] = { class_type: "TRTReport", inputs: { after: [id, 0] } };
    return part;
}

/**
 * Whether the model input of an engine node is connected.
 * @param {{inputs?: {link: unknown}[]}} node
 */
export function isWired(node) {
    return node.inputs?.[0]?.link != null;
}
