// Reads the graph as the page would queue it, and never asks a widget to serialise itself: that uploads pictures of a
// webcam, renders 3D scenes and ends recordings. What ComfyUI's graphToPrompt finds by its own walk is found here by the
// same rules: muted and bypassed nodes, reroutes, primitives, subgraphs and the widgets that they show outside.

import { isLink, upstreamOf } from "./graph.mjs";

/** Modes of nodes that no prompt holds. */
export const MUTED = 2, BYPASSED = 4;
/** What the server wants to know of nodes that no engine node depends on: its `picture_of`. */
const SIZES = ["width", "height", "length", "batch_size", "cfg"];

/** @typedef {{id: string, prefix: string, node: any, host: Place | null}} Place a node, in one use of its subgraph */

/** What widgets with a serialiser of their own gave when ComfyUI, or a build, last asked them. */
const sent = new WeakMap();

const isOff = (node) => node.mode === MUTED || node.mode === BYPASSED;
const isSent = (widget) => widget.name && widget.options?.serialize !== false;

/** One look at a graph; it is not followed when it changes. */
export class Look {
    /** @param {{nodes: any[]}} root the outermost graph */
    constructor(root) {
        /** @type {Map<string, Place>} by the ids that prompts give them: "5", or "2:5" inside the subgraph node 2 */
        this.places = new Map();
        this.#enter(root?.nodes ?? [], "", null, []);
    }

    /**
     * An API prompt with all links, all values of the nodes that some depend on, and the sizes that the other nodes ask for.
     * @param {string[]} ids
     * @returns {Record<string, {class_type: string, inputs: Record<string, any>}>}
     */
    prompt(ids) {
        const whole = this.#links();
        const upstream = upstreamOf(whole, ids);
        for (const [id, entry] of Object.entries(whole)) {
            const wanted = upstream.has(id) ? () => true : ({ name }) => SIZES.includes(name);
            entry.inputs = { ...this.#values(this.places.get(id).node, wanted), ...entry.inputs };
        }
        return whole;
    }

    /**
     * The part of the prompt that some nodes depend on, serialised as ComfyUI does it: only for what is about to run.
     * @param {string[]} ids
     */
    async serialised(ids) {
        for (const above of upstreamOf(this.#links(), ids)) {
            const { node } = this.places.get(above) ?? {};
            for (const [i, widget] of (node?.widgets ?? []).entries())
                if (isSent(widget) && widget.serializeValue) remember(widget, wrapped(widget, await widget.serializeValue(node, i)));
        }
        return this.prompt(ids);
    }

    /**
     * Learn from a prompt that ComfyUI has just made what the serialisers above some nodes give.
     * @param {Record<string, {inputs: Record<string, any>}>} output
     * @param {string[]} ids
     */
    learn(output, ids) {
        for (const id of upstreamOf(output, ids))
            for (const widget of this.places.get(id)?.node.widgets ?? [])
                if (isSent(widget) && widget.serializeValue && widget.name in output[id].inputs)
                    remember(widget, output[id].inputs[widget.name]);
    }

    #enter(nodes, prefix, host, inside) {
        for (const node of nodes) {
            const place = { id: `${prefix}${node.id}`, prefix, node, host };
            this.places.set(place.id, place);
            const opens = node.isSubgraphNode?.() && !inside.includes(node.subgraph) && (host !== null || !isOff(node));
            if (opens) this.#enter(node.subgraph.nodes, `${place.id}:`, place, [...inside, node.subgraph]);
        }
    }

    /** Every node that a prompt would hold, with its links alone. */
    #links() {
        const found = {};
        for (const place of this.places.values()) {
            const { node } = place;
            if (node.isVirtualNode || isOff(node)) continue;
            const inputs = {};
            for (const [slot, input] of (node.inputs ?? []).entries()) {
                const source = this.#source(place, slot, new Set());
                if (source) inputs[input.name] = "id" in source ? [source.id, source.slot] : source.value;
                const primitive = primitiveOf(node, input);
                if (primitive !== undefined) inputs[input.widget?.name ?? input.name] = primitive;
            }
            found[place.id] = { class_type: node.comfyClass, inputs };
        }
        for (const { inputs } of Object.values(found))
            for (const [name, value] of Object.entries(inputs)) if (isLink(value) && !found[value[0]]) delete inputs[name];
        return found;
    }

    #values(node, wanted) {
        const inputs = {};
        for (const widget of node.widgets ?? []) if (isSent(widget) && wanted(widget)) inputs[widget.name] = valueOf(widget);
        return inputs;
    }

    /** Where an input's value comes from: a node's output, or a widget that a subgraph node shows. */
    #source(place, slot, seen, type) {
        const input = place.node.inputs?.[slot], mark = `${place.id} in ${slot}`;
        if (!input || input.link == null || seen.has(mark)) return null;
        seen.add(mark);
        const link = place.node.graph?.getLink(input.link);
        if (!link) return null;
        if (link.originIsIoNode && place.host) return this.#outside(place.host, link.origin_slot, seen);
        return this.#output(this.places.get(`${place.prefix}${link.origin_id}`), link.origin_slot, type ?? input.type, seen);
    }

    #outside(host, slot, seen) {
        const input = host.node.inputs?.[slot];
        if (!input) return null;
        if (input.link != null) return this.#source(host, slot, seen);
        const shown = input.widgetId && host.node.widgets?.find((widget) => widget.widgetId === input.widgetId);
        return shown ? { value: list(shown.value) } : null;
    }

    #output(place, slot, type, seen) {
        const mark = `${place?.id} out ${slot}`;
        if (!place || place.node.mode === MUTED || seen.has(mark)) return null;
        seen.add(mark);
        const { node } = place;
        if (node.mode === BYPASSED) return this.#source(place, passing(node, slot, type), seen);
        if (node.isSubgraphNode?.()) {
            const inner = node.subgraph.outputNode?.slots[slot]?.getLinks()[0];
            return inner ? this.#output(this.places.get(`${place.id}:${inner.origin_id}`), inner.origin_slot, type, seen) : null;
        }
        if (!node.isVirtualNode) return { id: place.id, slot: Number(slot) };
        const far = node.resolveVirtualOutput?.(slot); // Set and Get nodes of other packs
        if (far) return this.#output([...this.places.values()].find((other) => other.node === far.node), far.slot, type, seen);
        const link = node.getInputLink?.(slot);
        return link ? this.#source(this.places.get(`${place.prefix}${link.target_id}`), link.target_slot, seen, type) : null;
    }
}

function remember(widget, given) {
    sent.set(widget, { value: JSON.stringify(widget.value), given });
}

/** What a widget would give: its value, or what its serialiser gave for that value. */
function valueOf(widget) {
    const known = widget.serializeValue && sent.get(widget);
    return known && known.value === JSON.stringify(widget.value) ? known.given : wrapped(widget, widget.value);
}

/** Lists are links in prompts, so values that are lists are wrapped. */
function wrapped(widget, value) {
    return Array.isArray(value) && widget.type === "curve" ? { __type__: "CURVE", __value__: value } : list(value);
}

function list(value) {
    return Array.isArray(value) ? { __value__: value } : value;
}

/** The value of a primitive that is wired to a widget; the page writes it into that widget when it queues. */
function primitiveOf(node, input) {
    const link = input.link == null ? null : node.graph?.getLink(input.link);
    const origin = link && !link.originIsIoNode ? node.graph.getNodeById(link.origin_id) : null;
    return origin?.type === "PrimitiveNode" ? list(origin.widgets?.[0]?.value) : undefined;
}

/** The input that a bypassed node passes on to an output, as ComfyUI chooses it. */
function passing(node, slot, type) {
    const inputs = node.inputs ?? [], output = node.outputs[slot].type;
    const fits = (input) => input && globalThis.LiteGraph.isValidConnection(input.type, output)
        && globalThis.LiteGraph.isValidConnection(input.type, type);
    if (type === "*" || type === "") return inputs.length > slot ? slot : 0;
    if (fits(inputs[slot])) return slot;
    const exact = inputs.findIndex((input) => input.type === type);
    return exact !== -1 ? exact : inputs.findIndex(fits);
}
