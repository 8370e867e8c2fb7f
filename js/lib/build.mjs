// The Build button: orders a build by a small prompt of its own, follows it, cancels it.

import { buildPrompt, engineNodes, isWired, upstreamOf } from "./graph.mjs";
import { ACCELERATE, NODE_FOR } from "./node_names.mjs";
import { Look } from "./look.mjs";
import { applyPreset } from "./presets.mjs";
import { LIVE } from "./panel_words.mjs";
import { request } from "./server.mjs";
import { said } from "./server_zh.mjs";
import { t } from "./texts.mjs";
import { changedUses, isMissing, isSame, usesOf, wantedUses } from "./workflow.mjs";
import { BUSY, duration, errorOf, lacksSizes, size } from "./words.mjs";

/** Where a prompt carries its order, which the server's `build_orders` reads. */
const ORDER = "hybrid_trt_build";
/** Seconds of builds in a row after which nobody may be looking: the message of the end stays until somebody closes it. */
const LONG = 20;

export class Builder {
    /**
     * @param {import("./tracker.mjs").Tracker} tracker
     * @param {(severity: string, summary: string, detail: string, stays?: boolean) => void} toast
     * @param {(node: any) => boolean} inSight whether the user sees a node: then it tells its errors itself
     */
    constructor(tracker, toast, inSight = () => false) {
        this.tracker = tracker;
        this.toast = toast;
        this.inSight = inSight;
        this.announced = new Set(); // jobs whose end was shown
        this.ours = new Set(); // keys of what was ordered or heard of here: its end is shown although the workflow was left
        this.sent = new WeakMap(); // node -> the last prompt that this page sent for it
        this.together = new Set(); // jobs that one press cancelled, for which one message is shown
        this.alive = new Map(); // id -> label of the builds that wait or run
        this.row = { since: 0, done: 0 }; // the builds that follow each other without a pause
        this.ended = new Map(); // prompts that ended while the answer with their id was under way
        this.sending = null; // resolves when the last order's prompt has its id, or has none
    }

    /** What a click on a node's button does. */
    async press(view) {
        try {
            await (view.busy ? this.cancel(view) : this.build([view]));
        } catch (failure) {
            this.#failed([view], failure.message);
        }
    }

    /** Order all that the workflow's nodes lack, by one prompt. */
    async buildAll() {
        let views = [];
        try {
            await this.tracker.settle(); // nodes may have been replaced, as by a subgraph: all that are there now are meant
            views = this.tracker.present.filter(({ state }) => isMissing(state));
            if (views.length) await this.build(views, true);
        } catch (failure) {
            this.#failed(views, failure.message);
        }
    }

    /** Cancel what some nodes wait for; a build that several wait for once. */
    async cancelAll(views) {
        this.together = new Set();
        try {
            await this.#withdraw(views, this.together);
            this.toast("info", t("cancelledToast"), t("cancelledMany"));
        } catch (failure) {
            this.toast("error", t("panel"), failure.message);
        }
        await this.tracker.refresh();
    }

    /** Build for what the engine does not take: a node's sizes are widened to a latent that does not fit them. */
    async buildFor(view) {
        const { widened } = view.state;
        if (view.busy || !(widened || lacksSizes(view.state))) return;
        applyPreset(view.node, widened ?? {});
        await this.press(view);
    }

    /**
     * Build an engine of the library again, on the node that wants it; whether there is one.
     * @param {{name: string, label: string, kind: string}} engine
     */
    async rebuild(engine) {
        const type = NODE_FOR[engine.kind];
        const views = engineNodes(this.tracker.root()).map(({ node }) => this.tracker.views.get(node))
            .filter((view) => [type, ACCELERATE].includes(view?.node.comfyClass));
        const view = views.find(({ state }) => usesOf(state).some((use) => use.engine?.names?.includes(engine.name)))
            ?? views.find(({ state }) => usesOf(state).some((use) => !use.engine && use.label === engine.label));
        if (!view) return false;
        if (!view.busy) await this.press(view);
        return true;
    }

    /**
     * Order the engines of nodes.
     * @param {any[]} views
     * @param {boolean} missingOnly build nothing again
     */
    build(views, missingOnly = false) {
        const sent = this.#send(views, missingOnly);
        this.sending = sent.catch(() => {}); // who asked for it tells its failure
        return sent;
    }

    async #send(views, missingOnly) {
        const { api, asked } = this.tracker, { sent } = this;
        const wanted = new Map(views.map(({ node, state }) => [node, wantedUses(state)]));
        for (const view of views) {
            const asks = (use) => wanted.get(view.node).some((one) => isSame(one, use));
            view.show(changedUses(view.state, (use) => (asks(use) ? { ...use, state: "asked", job: null } : use)));
            this.tracker.failures.delete(view.node);
        }
        for (const { node } of views) asked.set(node, "");
        this.tracker.tell();
        await this.tracker.settle(); // the graph may have changed a moment ago, and Auto's sizes follow it
        for (const { node, state } of views) for (const use of usesOf(state))
            if (use.key && wanted.get(node).some((one) => isSame(one, use))) this.ours.add(use.key);
        const { prompt, ids, order, titles } = await this.#prompt(wanted, missingOnly);
        const response = await api.fetchApi("/prompt", {
            method: "POST", headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ prompt, client_id: api.clientId, extra_data: { [ORDER]: order } }),
        });
        const answer = await response.json().catch(() => ({}));
        const refused = new Map(); // why -> the views that the server leaves out, which need not be all
        for (const view of views) {
            const why = refusal(prompt, ids.get(view.node), answer, titles) || (response.ok ? "" : promptError(answer, titles));
            if (why) refused.set(why, [...(refused.get(why) ?? []), view]);
            if (why) asked.delete(view.node);
            else for (const known of [asked, sent]) known.set(view.node, answer.prompt_id);
        }
        this.tracker.stale = true;
        if (this.ended.has(answer.prompt_id)) await this.promptEnded(answer.prompt_id, this.ended.get(answer.prompt_id));
        else await this.tracker.refresh();
        // a failure is that of a key: it is the one of what was sent only once the nodes know that
        if (refused.size) await this.tracker.settle();
        for (const [why, some] of refused) this.#failed(some, why);
    }

    /** Cancel what a node waits for: its build, or the prompt that would order it. */
    async cancel(view) {
        await this.#withdraw([view]);
        await this.tracker.refresh();
    }

    /**
     * Take back what nodes wait for: first the prompts that would order builds, then the builds.
     * @param {any[]} views
     * @param {Set<string>} cancelled the jobs that need no second word
     */
    async #withdraw(views, cancelled = new Set()) {
        const { tracker } = this, { api } = tracker;
        await this.sending;
        const waits = (view) => usesOf(view.state).filter(({ state }) => BUSY.includes(state));
        const asks = views.filter((view) => waits(view).some(({ job }) => !job));
        const prompts = new Set(asks.flatMap((view) => tracker.ordersOf(view)));
        for (const prompt of prompts) {
            await api.fetchApi("/queue", { method: "POST", body: JSON.stringify({ delete: [prompt] }) });
            await api.fetchApi("/interrupt", { method: "POST", body: JSON.stringify({ prompt_id: prompt }) });
            tracker.isOver(prompt);
        }
        if (prompts.size) { // a prompt that ran a moment ago has ordered builds that no node shows yet
            tracker.stale = true;
            await tracker.settle();
        }
        for (const { job } of views.flatMap(waits)) if (job && !cancelled.has(job.id)) {
            cancelled.add(job.id);
            await request(api, `/builds/${job.id}/cancel`, { method: "POST" });
        }
    }

    /** A prompt has ended; if it was one of ours, its node has a job now, or says why not. */
    async promptEnded(promptId, failure) {
        if ([...this.tracker.asked.values()].includes("")) this.ended.set(promptId, failure);
        else this.ended.clear();
        const ordered = (view) => this.sent.get(view.node) === promptId || this.tracker.ordersOf(view).includes(promptId);
        const views = [...this.tracker.views.values()].filter(ordered);
        if (!views.length) return;
        this.tracker.isOver(promptId);
        for (const { node } of views) this.sent.delete(node);
        await this.tracker.refresh();
        if (failure) this.#failed(views, failure);
    }

    /**
     * The prompt that orders the engines of nodes, the ids of each in it, and the order. Only what they depend on is serialised.
     * @param {Map<any, {id: string}[]>} wanted node -> its uses, as of the last look
     */
    async #prompt(wanted, missingOnly) {
        const { app } = this.tracker;
        const look = new Look(this.tracker.root());
        const whole = look.prompt([]);
        const found = engineNodes(this.tracker.root()).filter(({ node }) => wanted.has(node)).map(({ node, ids }) => {
            const there = ids.filter((id) => whole[id]), known = there.filter((id) => wanted.get(node).some((use) => use.id === id));
            return [node, known.length ? known : there];
        });
        const ids = found.flatMap(([, its]) => its);
        if (!ids.length) throw new Error(t("offBuild"));
        // other packs may wire a node while ComfyUI serialises, and only then
        const part = [...wanted.keys()].every(isWired) ? await look.serialised(ids) : (await app.graphToPrompt()).output;
        const order = { nodes: ids, missing_only: missingOnly, graph: whole }; // the server finds the pictures in it
        const titles = (id) => look.places.get(id)?.node.title;
        return { prompt: buildPrompt(part, ids), ids: new Map(found), order, titles };
    }

    #failed(views, text) {
        for (const view of views) {
            this.tracker.asked.delete(view.node);
            this.#show(view, text);
        }
        this.tracker.tell();
        this.#tellFailure(views, text);
    }

    /** One place tells a failure: the node that it is of, or a toast where nobody sees that. */
    #tellFailure(views, text, stays = false) {
        if (!views.some(({ node }) => this.inSight(node))) this.toast("error", t("failedToast"), text, stays);
    }

    /** Show why a build could not be ordered, until another one is. */
    #show(view, text) {
        const uses = usesOf(view.state), lacking = uses.filter(({ state }) => !["ready", "queued", "building"].includes(state));
        const keys = (lacking.length ? lacking : uses).map(({ key }) => key);
        this.tracker.failures.set(view.node, { keys, text });
        view.show(changedUses(view.state, (use) => (keys.includes(use.key) ? { ...use, state: "failed", build_helps: true, text, job: null } : use)));
    }

    /** The server is there again; a message names the builds that it has lost. */
    async reconnected() {
        if (!this.alive.size) return;
        const known = (await request(this.tracker.api, "/builds")).map(({ id }) => id);
        const lost = [...this.alive].filter(([id]) => !known.includes(id));
        for (const [id] of lost) this.alive.delete(id);
        if (lost.length) this.toast("warn", t("lostToast"), t("lostText", { labels: lost.map(([, label]) => label).join(", ") }));
    }

    /** A job has changed; its end is shown once. */
    async hear(job) {
        const alive = LIVE.includes(job.state);
        if (alive && !this.alive.size) this.row = { since: Date.now() - 1000 * (job.seconds ?? 0), done: 0 };
        alive ? this.alive.set(job.id, job.label) : this.alive.delete(job.id);
        const stays = !this.alive.size && Date.now() - this.row.since >= 1000 * LONG;
        const views = this.tracker.hear(job);
        if (views.length) for (const key of job.keys) this.ours.add(key);
        const ours = job.keys.some((key) => this.ours.has(key));
        if (!["done", "failed", "cancelled"].includes(job.state) || this.announced.has(job.id) || !ours) return;
        this.announced.add(job.id);
        for (const key of job.keys) this.ours.delete(key);
        await this.tracker.refresh();
        if (job.state === "failed") this.#tellFailure(this.tracker.waitingFor(job), said(job.message), stays);
        if (job.state === "cancelled" && !this.together.has(job.id)) this.toast("info", t("cancelledToast"), job.label);
        const engine = job.state === "done" && (this.#engineOf(job) ?? await this.#inLibrary(job));
        if (engine) {
            const words = { label: job.label, size: size(engine.bytes), seconds: duration(job.seconds), error: errorOf(engine) };
            const count = this.row.done += 1;
            this.toast("success", t(stays && count > 1 ? "builtMany" : "built", { count }), t("builtDetail", words), stays);
        }
    }

    /** The engine of a job that has ended well, as a node that waited for it has it. */
    #engineOf(job) {
        const uses = this.tracker.waitingFor(job).flatMap(({ state }) => usesOf(state));
        return uses.find(({ key, engine }) => engine && job.keys.includes(key))?.engine;
    }

    /** It as the library has it, when the nodes that waited for it were left. */
    async #inLibrary(job) {
        const { engines } = await request(this.tracker.api, "/engines");
        return engines.find(({ name }) => name === job.engine);
    }
}

/**
 * Why the server leaves a node out of a prompt, of which it may have taken the rest; empty when it does not.
 * @param {Record<string, any>} prompt
 * @param {string[]} ids the node's, of each of its uses
 * @param {{node_errors?: Record<string, any>}} answer
 * @param {(id: string) => string | undefined} [titles] what a node is called
 */
export function refusal(prompt, ids = [], answer, titles) {
    const above = upstreamOf(prompt, ids);
    const errors = Object.entries(answer.node_errors ?? {}).filter(([other]) => above.has(other));
    return errors.length ? promptError({ node_errors: Object.fromEntries(errors) }, titles) : "";
}

/** Why a prompt failed while it ran; an error without a word is named by its kind. */
export function runError({ node_type: node, exception_type: kind, exception_message: message }) {
    return `${node}: ${String(message ?? "").trim() || kind}`;
}

/** The server's refusal of a prompt as one sentence. */
export function promptError(answer, titles = () => undefined) {
    const [id, node] = Object.entries(answer.node_errors ?? {})[0] ?? [];
    const first = node?.errors?.[0], { input_name: input = "", received_value: file } = first?.extra_info ?? {};
    if (first?.type === "value_not_in_list" && /_name$/.test(input) && typeof file === "string")
        return t("missingFile", { file, node: titles(id) ?? node.class_type });
    if (first) return `${node.class_type}: ${[first.message, first.details].filter(Boolean).join(": ")}.`;
    return answer.error?.message ?? "The server refused the build; see its log.";
}
