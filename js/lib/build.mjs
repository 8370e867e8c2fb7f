// The Build button: orders a build by a small prompt of its own, follows it, cancels it.

import { widened } from "./fit.mjs";
import { buildPrompt, engineNodes, isWired } from "./graph.mjs";
import { Look } from "./look.mjs";
import { applyPreset, sizesOf } from "./presets.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";
import { duration, error, size } from "./words.mjs";

export class Builder {
    /**
     * @param {import("./tracker.mjs").Tracker} tracker
     * @param {(severity: string, summary: string, detail: string) => void} toast
     * @param {() => void} begun called, more than once, when the build of a node begins
     */
    constructor(tracker, toast, begun = () => {}) {
        this.tracker = tracker;
        this.toast = toast;
        this.begun = begun;
        this.told = new Set(); // jobs whose end was told
        this.ended = new Map(); // prompts that ended while the answer with their id was under way
    }

    /** What a click on a node's button does. */
    async press(view) {
        try {
            await (view.busy ? this.cancel(view) : this.build(view));
        } catch (failure) {
            this.tracker.asked.delete(view.node);
            this.#fail(view, failure.message);
        }
    }

    /** Widen a node's sizes to the latent that does not fit, and build. */
    async buildFor(view) {
        if (!view.state.misfit || view.busy) return;
        applyPreset(view.node, widened(view.state.misfit, sizesOf(view.node), view.state.fits));
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
        const view = views.find(({ state }) => state.engine?.name === engine.name)
            ?? views.find(({ state }) => !state.engine && state.label === engine.label);
        if (!view) return false;
        if (!view.busy) await this.press(view);
        return true;
    }

    /** Order the engine of a node. */
    async build(view) {
        const { api } = this.tracker;
        view.show({ ...view.state, state: "asked", job: null });
        this.tracker.failures.delete(view.node);
        const prompt = await this.#prompt(view.node);
        this.tracker.asked.set(view.node, "");
        const response = await api.fetchApi("/prompt", {
            method: "POST", headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ prompt, client_id: api.clientId }),
        });
        const answer = await response.json().catch(() => ({}));
        if (!response.ok) throw new Error(promptError(answer));
        this.tracker.asked.set(view.node, answer.prompt_id);
        this.tracker.stale = true;
        if (this.ended.has(answer.prompt_id)) await this.promptEnded(answer.prompt_id, this.ended.get(answer.prompt_id));
        else await this.tracker.refresh();
    }

    /** Cancel what a node waits for: its build, or the prompt that would order it. */
    async cancel(view) {
        const { api, asked } = this.tracker;
        if (view.state.job) {
            await request(api, `/builds/${view.state.job.id}/cancel`, { method: "POST" });
        } else if (asked.get(view.node)) {
            const prompt = asked.get(view.node);
            await api.fetchApi("/queue", { method: "POST", body: JSON.stringify({ delete: [prompt] }) });
            await api.fetchApi("/interrupt", { method: "POST", body: JSON.stringify({ prompt_id: prompt }) });
            asked.delete(view.node);
        }
        await this.tracker.refresh();
    }

    /** A prompt has ended; if it was one of ours, its node has a job now, or says why not. */
    async promptEnded(promptId, failure) {
        if ([...this.tracker.asked.values()].includes("")) this.ended.set(promptId, failure);
        else this.ended.clear();
        for (const [node, id] of [...this.tracker.asked]) {
            if (id !== promptId) continue;
            this.tracker.asked.delete(node);
            await this.tracker.refresh();
            const view = this.tracker.views.get(node);
            if (failure && view) this.#fail(view, failure);
        }
    }

    /** The prompt that orders a node's engine. Only what it depends on is serialised. */
    async #prompt(node) {
        const { app } = this.tracker;
        const ids = engineNodes(this.tracker.root()).find((found) => found.node === node)?.ids ?? [];
        const look = new Look(this.tracker.root());
        const whole = look.prompt([]);
        const id = ids.find((id) => whole[id]);
        if (!id) throw new Error(t("offHint"));
        // other packs may wire a node while ComfyUI serialises, and only then
        const part = isWired(node) ? await look.serialised(id) : (await app.graphToPrompt()).output;
        return buildPrompt(part, id, crypto.randomUUID?.() ?? String(Math.random()));
    }

    /** Show why a build could not be ordered, until another one is. */
    #fail(view, text) {
        this.tracker.failures.set(view.node, { key: view.key, text });
        view.show({ ...view.state, state: "failed", text, job: null });
        this.toast("error", t("failedToast"), text);
    }

    /** A job has changed; its end is told once. */
    async hear(job) {
        const views = this.tracker.hear(job);
        if (views.length && job.state === "running") this.begun();
        if (!["done", "failed", "cancelled"].includes(job.state) || this.told.has(job.id) || !views.length) return;
        this.told.add(job.id);
        await this.tracker.refresh();
        if (job.state === "failed") this.toast("error", t("failedToast"), job.message);
        if (job.state === "cancelled") this.toast("info", t("cancelledToast"), job.label);
        const engine = views[0].state.engine;
        if (job.state === "done" && engine) {
            const words = { label: job.label, size: size(engine.bytes), seconds: duration(job.seconds), error: error(engine.rel_err) };
            this.toast("success", t("built"), t("builtDetail", words));
        }
    }
}

/** The server's refusal of a prompt as one sentence. */
export function promptError(answer) {
    const node = Object.values(answer.node_errors ?? {})[0];
    const first = node?.errors?.[0];
    if (first) return `${node.class_type}: ${[first.message, first.details].filter(Boolean).join(": ")}.`;
    return answer.error?.message ?? "The server refused the build; see its log.";
}
