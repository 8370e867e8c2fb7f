// Keeps every engine node's view true: asks the server after anything that may have changed it, and hears its events.

import { misfitOf } from "./fit.mjs";
import { ancestors, engineNodes, isWired } from "./graph.mjs";
import { request } from "./server.mjs";

const PATIENCE = 250;

export class Tracker {
    /**
     * @param {any} app ComfyUI's app
     * @param {any} api ComfyUI's api
     */
    constructor(app, api) {
        this.app = app;
        this.api = api;
        /** @type {Map<any, import("./node_view.mjs").NodeView>} */
        this.views = new Map();
        /** @type {Map<any, string>} node -> prompt that orders its build and has not run yet */
        this.asked = new Map();
        /** @type {Map<any, {key: string, text: string}>} node -> why its last build could not even be ordered */
        this.failures = new Map();
        /** @type {Map<any, number>} node -> when an event last told its state */
        this.heard = new Map();
        this.turn = 0;
        this.timer = null;
    }

    /** Ask for all states soon; many calls in a row ask once, and calls without end do not put it off. */
    soon() {
        this.timer ??= setTimeout(() => {
            this.timer = null;
            this.refresh().catch(() => {});
        }, PATIENCE);
    }

    /** Ask for all states now. A server that does not answer leaves the nodes as they are: the page says so itself. */
    async refresh() {
        const turn = ++this.turn;
        const started = performance.now();
        const found = engineNodes(this.root()).filter(({ node }) => this.views.has(node));
        this.#forget(found);
        if (!found.length) return;
        const { output } = await this.app.graphToPrompt();
        const ids = found.flatMap(({ node, ids }) => (isWired(node) ? ids.filter((id) => output[id]).slice(0, 1) : []));
        const answer = ids.length
            ? await request(this.api, "/nodes", { method: "POST", json: { prompt: ancestors(output, ids), nodes: ids } })
            : { nodes: {} };
        if (turn !== this.turn) return; // a later question is under way
        for (const { node, ids } of found) {
            if (this.heard.get(node) > started) continue; // the answer is older than the event
            const id = ids.find((id) => id in answer.nodes);
            const state = id && { ...answer.nodes[id], misfit: misfitOf(output, id, answer.nodes[id]) };
            this.#apply(node, state || { state: isWired(node) ? "off" : "unwired", key: "" });
        }
    }

    /**
     * A job has changed.
     * @param {any} job with the `keys` of the nodes that wait for it
     * @returns {import("./node_view.mjs").NodeView[]} the views of these nodes
     */
    hear(job) {
        const views = [...this.views.values()].filter((view) => view.key && job.keys.includes(view.key));
        if (["queued", "running"].includes(job.state)) {
            const state = job.state === "running" ? "building" : "queued";
            for (const view of views) {
                this.heard.set(view.node, performance.now());
                view.show({ ...view.state, state, job, text: "" });
            }
        }
        if (!views.length || !["queued", "running"].includes(job.state)) this.soon();
        return views;
    }

    /** The outermost graph, whatever subgraph is open. */
    root() {
        return this.app.rootGraph ?? this.app.graph?.rootGraph ?? this.app.graph;
    }

    #apply(node, state) {
        const waiting = this.asked.has(node) && !["queued", "building"].includes(state.state);
        const failure = this.failures.get(node);
        if (failure && (failure.key !== state.key || !["unknown", "none"].includes(state.state))) this.failures.delete(node);
        else if (failure && !waiting) state = { ...state, state: "failed", text: failure.text, job: null };
        this.views.get(node).show(waiting ? { ...state, state: "asked", job: null } : state);
    }

    #forget(found) {
        const alive = new Set(found.map(({ node }) => node));
        for (const node of this.views.keys()) if (!alive.has(node) && !node.graph) {
            for (const known of [this.views, this.asked, this.failures, this.heard]) known.delete(node);
        }
    }
}
