// What can be done with engines from the panel. Each ends in a message: what happened, or why it did not.

import { confirm, showText } from "./dialog.mjs";
import { deleteQuestion, engineRow } from "./panel_words.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";
import { size } from "./words.mjs";

const path = (name) => `/engines/${encodeURIComponent(name)}`;

export class PanelActions {
    /**
     * @param {any} api ComfyUI's api
     * @param {{toast: (severity: string, summary: string, detail: string) => void, rebuild: (engine: any) => Promise<boolean>}} page
     * @param {() => Promise<void>} load asks for the lists again
     */
    constructor(api, page, load) {
        this.api = api;
        this.page = page;
        this.load = load;
    }

    /** The entries of an engine's menu. */
    entries(engine) {
        const entry = (key, act, danger = false) => ({ label: t(key), act, danger });
        return [
            ...(engine.label ? [entry("rebuild", () => this.rebuild(engine))] : []),
            entry("verify", () => this.verify(engine)),
            entry("rowDetails", () => showText(engine.label ?? engine.name, engineRow(engine).details)),
            entry("deleteEngine", () => this.delete([engine]), true),
        ];
    }

    verify({ name, label }) {
        return this.attempt(async () => {
            const { ok, text } = await request(this.api, `${path(name)}/verify`, { method: "POST" });
            this.#tell(ok ? "success" : "error", t(ok ? "verified" : "damaged", { name: label ?? name, text }));
        });
    }

    async rebuild(engine) {
        const found = await this.page.rebuild(engine);
        const node = engine.kind === "unet" ? "TRT UNet Engine" : "TRT ControlNet Engine";
        this.#tell("info", t(found ? "rebuildStarted" : "rebuildWhere", { label: engine.label, node }));
    }

    /** Delete engines once that is confirmed; one that cannot be deleted does not keep the others. */
    async delete(engines) {
        if (!engines.length || !(await confirm(deleteQuestion(engines)))) return;
        const gone = [];
        await this.attempt(async () => {
            let failed = null;
            for (const engine of engines) {
                try {
                    await request(this.api, path(engine.name), { method: "DELETE" });
                    gone.push(engine);
                } catch (failure) {
                    failed = failure;
                }
            }
            if (failed) throw failed;
        });
        if (gone.length) this.#deleted(gone.length, gone.reduce((sum, { bytes }) => sum + bytes, 0), gone[0]);
        await this.load();
    }

    cancel(job) {
        return this.attempt(() => request(this.api, `/builds/${job.id}/cancel`, { method: "POST" }));
    }

    clearFinished() {
        return this.attempt(() => request(this.api, "/builds/clear", { method: "POST" }));
    }

    /** Do something; what it throws is told. */
    async attempt(act) {
        try {
            await act();
        } catch (failure) {
            this.page.toast("error", t("failedAction"), failure.message);
        }
    }

    #deleted(count, bytes, only) {
        const one = count === 1 && only;
        this.#tell("info", one ? t("deleted", { name: only.label ?? only.name }) : t("deletedMany", { count, size: size(bytes) }));
    }

    #tell(severity, words) {
        this.page.toast(severity, t("panel"), words);
    }
}
