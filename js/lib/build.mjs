// The Build button: orders a build by a small prompt of its own, follows it, cancels it.

import { pictureWords, widened } from "./fit.mjs";
import { buildPrompt, engineNodes, isWired, upstreamOf } from "./graph.mjs";
import { Look } from "./look.mjs";
import { applyPreset, sizesOf } from "./presets.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";
import { duration, error, lacksSizes, size } from "./words.mjs";

/** Words in a request, which the server's `node_key` knows: the page shows the build itself; builds nothing anew. */
const FROM_PAGE = "page ", MISSING_ONLY = "missing ";

export class Builder {
    /**
     * @param {import("./tracker.mjs").Tracker} tracker
     * @param {(severity: string, summary: string, detail: string) => void} toast
     * @param {() => void} begun called, more than once, when the build of a node begins
     * @param {(node: any) => boolean} inSight whether the user sees a node: then it tells its errors itself
     */
    constructor(tracker, toast, begun = () => {}, inSight = () => false) {
        this.tracker = tracker;
        this.toast = toast;
        this.begun = begun;
        this.inSight = inSight;
        this.told = new Set(); // jobs whose end was told
        this.ended = new Map(); // prompts that ended while the answer with their id was under way
    }

    /** What a click on a node's button does. */
    async press(view) {
        try {
            await (view.busy ? this.cancel(view) : this.build([view]));
        } catch (failure) {
            this.#failed([view], failure.message);
        }
    }

    /** Order all that some nodes lack, by one prompt. */
    async buildAll(views) {
        try {
            await this.build(views, MISSING_ONLY);
        } catch (failure) {
            this.#failed(views, failure.message);
        }
    }

    /** Cancel what some nodes wait for; a build that several wait for once. */
    async cancelAll(views) {
        const waits = new Map(views.map((view) => [view.state.job?.id ?? this.tracker.asked.get(view.node), view]));
        try {
            for (const view of waits.values()) await this.#withdraw(view);
        } catch (failure) {
            this.toast("error", t("panel"), failure.message);
        }
        await this.tracker.refresh();
    }

    /** Build for what the engine does not take: a node's sizes are widened to a latent that does not fit them. */
    async buildFor(view) {
        const { misfit, fits } = view.state;
        if (view.busy || !(misfit || lacksSizes(view.state))) return;
        if (misfit) applyPreset(view.node, widened(misfit, sizesOf(view.node), fits));
        await this.press(view);
    }

    /**
     * Build an engine of the library again, on the node that wants it; whether there is one.
     * @param {{name: string, label: string, kind: string}} engine
     */
    async rebuild(engine) {
        const type = engine.kind === "unet" ? "TRTUNetEngine" : "TRTControlNetEngine";
        const views = engineNodes(this.tracker.root()).map(({ node }) => this.tracker.views.get(node))
            .filter((view) => view?.node.comfyClass === type);
        const view = views.find(({ state }) => state.engine?.names?.includes(engine.name))
            ?? views.find(({ state }) => !state.engine && state.label === engine.label);
        if (!view) return false;
        if (!view.busy) await this.press(view);
        return true;
    }

    /**
     * Order the engines of nodes.
     * @param {any[]} views
     * @param {string} mark what the request begins with
     */
    async build(views, mark = "") {
        const { api, asked } = this.tracker;
        for (const view of views) {
            view.show({ ...view.state, state: "asked", job: null });
            this.tracker.failures.delete(view.node);
        }
        this.tracker.tell();
        const { prompt, ids } = await this.#prompt(views.map(({ node }) => node), mark);
        for (const { node } of views) asked.set(node, "");
        const response = await api.fetchApi("/prompt", {
            method: "POST", headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ prompt, client_id: api.clientId }),
        });
        const answer = await response.json().catch(() => ({}));
        const refused = new Map(); // why -> the views that the server leaves out, which need not be all
        for (const view of views) {
            const why = refusal(prompt, ids.get(view.node), answer) || (response.ok ? "" : promptError(answer));
            if (why) refused.set(why, [...(refused.get(why) ?? []), view]);
            if (why) asked.delete(view.node);
            else asked.set(view.node, answer.prompt_id);
        }
        this.tracker.stale = true;
        if (this.ended.has(answer.prompt_id)) await this.promptEnded(answer.prompt_id, this.ended.get(answer.prompt_id));
        else await this.tracker.refresh();
        for (const [why, some] of refused) this.#failed(some, why);
    }

    /** Cancel what a node waits for: its build, or the prompt that would order it. */
    async cancel(view) {
        await this.#withdraw(view);
        await this.tracker.refresh();
    }

    async #withdraw(view) {
        const { api, asked } = this.tracker;
        if (view.state.job) {
            await request(api, `/builds/${view.state.job.id}/cancel`, { method: "POST" });
        } else if (asked.get(view.node)) {
            const prompt = asked.get(view.node);
            await api.fetchApi("/queue", { method: "POST", body: JSON.stringify({ delete: [prompt] }) });
            await api.fetchApi("/interrupt", { method: "POST", body: JSON.stringify({ prompt_id: prompt }) });
            for (const [node, id] of [...asked]) if (id === prompt) asked.delete(node);
        }
    }

    /** A prompt has ended; if it was one of ours, its node has a job now, or says why not. */
    async promptEnded(promptId, failure) {
        if ([...this.tracker.asked.values()].includes("")) this.ended.set(promptId, failure);
        else this.ended.clear();
        const nodes = [...this.tracker.asked].filter(([, id]) => id === promptId).map(([node]) => node);
        for (const node of nodes) this.tracker.asked.delete(node);
        if (nodes.length) await this.tracker.refresh();
        const views = nodes.map((node) => this.tracker.views.get(node)).filter(Boolean);
        if (failure && views.length) this.#failed(views, failure);
    }

    /** The prompt that orders the engines of nodes, and their ids in it. Only what they depend on is serialised. */
    async #prompt(nodes, mark) {
        const { app } = this.tracker;
        const found = engineNodes(this.tracker.root());
        const look = new Look(this.tracker.root());
        const whole = look.prompt([]);
        const idOf = (node) => found.find((one) => one.node === node)?.ids.find((id) => whole[id]);
        const known = new Map(nodes.map((node) => [node, idOf(node)])), ids = [...known.values()].filter(Boolean);
        if (!ids.length) throw new Error(t("offBuild"));
        // other packs may wire a node while ComfyUI serialises, and only then
        const part = nodes.every(isWired) ? await look.serialised(ids) : (await app.graphToPrompt()).output;
        const request = FROM_PAGE + mark + (crypto.randomUUID?.() ?? String(Math.random()));
        return { prompt: buildPrompt(part, ids, request, (id) => pictureWords(whole, id)), ids: known };
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
    #tellFailure(views, text) {
        if (!views.some(({ node }) => this.inSight(node))) this.toast("error", t("failedToast"), text);
    }

    /** Show why a build could not be ordered, until another one is. */
    #show(view, text) {
        this.tracker.failures.set(view.node, { key: view.key, text });
        view.show({ ...view.state, state: "failed", text, job: null });
    }

    /** A job has changed; its end is told once. */
    async hear(job) {
        const views = this.tracker.hear(job);
        if (views.length && job.state === "running") this.begun();
        if (!["done", "failed", "cancelled"].includes(job.state) || this.told.has(job.id) || !views.length) return;
        this.told.add(job.id);
        await this.tracker.refresh();
        if (job.state === "failed") this.#tellFailure(views, job.message);
        if (job.state === "cancelled") this.toast("info", t("cancelledToast"), job.label);
        const engine = views[0].state.engine;
        if (job.state === "done" && engine) {
            const words = { label: job.label, size: size(engine.bytes), seconds: duration(job.seconds), error: error(engine.rel_err) };
            this.toast("success", t("built"), t("builtDetail", words));
        }
    }
}

/**
 * Why the server leaves a node out of a prompt, of which it may have taken the rest; empty when it does not.
 * @param {Record<string, any>} prompt
 * @param {string} id the node's
 * @param {{node_errors?: Record<string, any>}} answer
 */
export function refusal(prompt, id, answer) {
    const above = upstreamOf(prompt, [id]);
    const errors = Object.entries(answer.node_errors ?? {}).filter(([other]) => above.has(other));
    return errors.length ? promptError({ node_errors: Object.fromEntries(errors) }) : "";
}

/** The server's refusal of a prompt as one sentence. */
export function promptError(answer) {
    const node = Object.values(answer.node_errors ?? {})[0];
    const first = node?.errors?.[0];
    if (first) return `${node.class_type}: ${[first.message, first.details].filter(Boolean).join(": ")}.`;
    return answer.error?.message ?? "The server refused the build; see its log.";
}
