// Keeps every engine node's view true. It looks at the graph when that may have changed, asks the server after anything
// that may have changed its answer, and does nothing while nothing happens or nobody sees the page.

import { engineNodes, isLink, isWired } from "./graph.mjs";
import { Look } from "./look.mjs";
import { numbersFromOutside } from "./presets.mjs";
import { request } from "./server.mjs";
import { changedUses, isSame, together, usesOf } from "./workflow.mjs";
import { meaning } from "./words.mjs";

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
        /** @type {Map<any, string>} node -> prompt that orders its build, "" until it has an id; then the server tells */
        this.asked = new Map();
        this.over = new Set(); // prompts that have ended or were taken back, which ComfyUI's queue may still hold
        /** @type {Map<any, {keys: string[], text: string}>} node -> why its last build could not even be ordered */
        this.failures = new Map();
        /** @type {Map<any, number>} node -> when an event last brought its state */
        this.heard = new Map();
        this.jobs = new Set(); // that events have named
        /** @type {Set<() => void>} called when nodes may show something else */
        this.watchers = new Set();
        this.turn = 0; // of the last question
        this.answered = 0; // of the last one whose answer the nodes show
        this.timer = null;
        this.stale = true; // the graph may have changed since the last look at it
        this.waiting = false; // something happened while nobody saw the page
        this.seen = { found: [], ids: new Map(), off: new Set(), prompt: {} };
    }

    /** The views of the open workflow's engine nodes, as of the last look; others are made, or were left since it. */
    get present() {
        return this.seen.found.map((node) => this.views.get(node)).filter(Boolean);
    }

    /** Call the watchers, which show several nodes at once: some nodes may show something else. */
    tell() {
        for (const watcher of this.watchers) watcher();
    }

    /** The graph may have changed. */
    changed() {
        this.stale = true;
        this.soon();
    }

    /** Ask for all states soon; many calls in a row ask once, and calls without end do not put it off. */
    soon() {
        if (!this.views.size) return;
        this.waiting = Boolean(globalThis.document?.hidden);
        if (this.waiting) return;
        this.timer ??= setTimeout(() => {
            this.timer = null;
            this.refresh().catch(() => {});
        }, PATIENCE);
    }

    /** The page is seen again. */
    shown() {
        if (this.waiting) this.soon();
    }

    /** The prompts that are still to order the build of a view's node, whoever sent them. */
    ordersOf(view) {
        const found = usesOf(view.state).flatMap(({ orders }) => orders ?? []), sent = this.asked.get(view.node);
        return [...new Set(sent ? [...found, sent] : found)].filter((prompt) => !this.over.has(prompt));
    }

    /** A prompt orders nothing any more. */
    isOver(prompt) {
        this.over.add(prompt);
        for (const [node, id] of this.asked) if (id === prompt) this.asked.delete(node);
    }

    /**
     * Ask for all states now. A server that does not answer leaves the nodes as they are: the page says so itself.
     * @returns {Promise<boolean>} whether the nodes show this answer, and not that to a later question
     */
    async refresh() {
        const turn = ++this.turn;
        const started = performance.now();
        if (this.stale) this.#look();
        const { found, ids, off, prompt } = this.seen;
        if (!found.length) { this.answered = turn; this.tell(); return true; }
        const nodes = [...ids.values()], queued = [...this.asked].filter(([, id]) => id);
        const { nodes: answer = {}, orders = {} } = nodes.length || queued.length
            ? await request(this.api, "/nodes", { method: "POST", json: { prompt, nodes, workflow: this.root()?.id } }) : {};
        if (turn !== this.turn) return false;
        this.answered = turn;
        const graphChanged = this.stale; // since the question: Auto waits for the answer to the next one
        for (const id of this.over) orders[id] ? delete orders[id] : this.over.delete(id);
        // a node that gets its model only as ComfyUI queues has no key: its prompt alone can be looked for
        for (const [node, id] of queued) if (ids.has(node) || !orders[id]) this.asked.delete(node);
        for (const node of found) {
            if (this.heard.get(node) > started) continue; // the answer is older than the event
            const there = (ids.get(node) ?? []).filter((id) => answer[id]);
            const uses = there.flatMap((id) => usesOf(answer[id]).map((use) => ({
                ...use, id, whenMissing: meaning(prompt[id].inputs.when_missing, use),
                sizes: graphChanged && use.sizes ? { ...use.sizes, auto: null } : use.sizes,
                outside: numbersFromOutside(node, prompt[id].inputs),
                orders: Object.keys(orders).filter((one) => orders[one].includes(use.key)),
            })));
            this.#apply(node, uses.length ? uses : [{ state: off.has(node) ? "off" : "unwired", key: "" }]);
        }
        this.tell();
        return true;
    }

    /** Ask until the nodes show the graph as it is now, Auto's numbers too; a server that does not answer changes nothing. */
    async settle() {
        try {
            for (let tries = 0; tries < 5 && (this.stale || this.answered !== this.turn); tries += 1) await this.refresh();
        } catch { /* the page says so itself */ }
    }

    /** ComfyUI has queued a prompt: what its serialisers gave is part of the keys from now on. */
    queued(output) {
        if (!this.views.size) return;
        new Look(this.root()).learn(output, [...this.seen.ids.values()].flat());
        this.changed();
    }

    /**
     * A job has changed.
     * @param {any} job with the `keys` of the nodes that wait for it
     * @returns {import("./node_view.mjs").NodeView[]} the views of these nodes
     */
    hear(job) {
        const waits = ({ key }) => key && job.keys.includes(key), views = this.waitingFor(job);
        if (["queued", "running"].includes(job.state)) {
            const state = job.state === "running" ? "building" : "queued";
            for (const view of views) {
                this.heard.set(view.node, performance.now());
                view.show(changedUses(view.state, (use) => (waits(use) ? { ...use, state, job, text: "" } : use)));
            }
            if (views.length) this.tell();
        }
        const alive = ["queued", "running"].includes(job.state);
        if (!alive || (!views.length && !this.jobs.has(job.id))) this.soon();
        this.jobs.add(job.id);
        return views;
    }

    /** The views of the nodes that wait for a job. */
    waitingFor({ keys }) {
        return this.present.filter(({ state }) => usesOf(state).some(({ key }) => key && keys.includes(key)));
    }

    /** The outermost graph, whatever subgraph is open. */
    root() {
        return this.app.rootGraph ?? this.app.graph?.rootGraph ?? this.app.graph;
    }

    /** Find the engine nodes, and the prompt that they are part of. */
    #look() {
        const found = engineNodes(this.root()).filter(({ node }) => this.views.has(node));
        this.#forget(found);
        const prompt = found.length ? new Look(this.root()).prompt(found.flatMap(({ ids }) => ids)) : {};
        const wired = ({ node, ids }) => ids.filter((id) => isLink(prompt[id]?.inputs[node.inputs[0].name]));
        const isOff = ({ node, ids }) => isWired(node) && !ids.some((id) => prompt[id]);
        this.seen = {
            found: found.map(({ node }) => node), prompt,
            ids: new Map(found.map((one) => [one.node, wired(one)]).filter(([, uses]) => uses.length)),
            off: new Set(found.filter(isOff).map(({ node }) => node)),
        };
        this.stale = false;
    }

    #apply(node, uses) {
        const view = this.views.get(node), failure = this.failures.get(node);
        const pressed = (use) => this.asked.has(node) && usesOf(view.state).some((one) => isSame(one, use) && one.state === "asked");
        const failed = (use) => failure?.keys.includes(use.key) && ["unknown", "none"].includes(use.state);
        const waits = (use) => (pressed(use) || use.orders?.length) && !["queued", "building"].includes(use.state);
        if (!uses.some(failed)) this.failures.delete(node);
        view.show(together(uses.map((use) => {
            if (waits(use)) return { ...use, state: "asked", job: null };
            return failed(use) ? { ...use, state: "failed", text: failure.text, job: null } : use;
        })));
    }

    /** Forget the nodes that were left: those that the last look found and this one does not, and those in no graph of ours. */
    #forget(found) {
        const alive = new Set(found.map(({ node }) => node)), before = new Set(this.seen.found);
        for (const node of this.views.keys()) if (!alive.has(node) && (before.has(node) || !this.#holds(node))) {
            for (const known of [this.views, this.asked, this.failures, this.heard]) known.delete(node);
        }
    }

    /** Whether a node is in the open workflow's graphs: one that was cleared leaves its nodes their `graph`. */
    #holds(node) {
        const { graph } = node, root = this.root();
        return Boolean(graph) && (graph === root || root?.subgraphs?.get(graph.id) === graph) && graph.getNodeById(node.id) === node;
    }
}
