// What can be done with engines from the panel. Each ends in a message: what happened, or why it did not.

import { make } from "./dom.mjs";
import { confirm, showText } from "./dialog.mjs";
import { deleteQuestion, engineRow, unused } from "./panel_words.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";
import { size } from "./words.mjs";

const UNUSED_DAYS = 30;
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
        const sound = engine.label && engine.state !== "broken";
        return [
            ...(engine.label ? [entry("rebuild", () => this.rebuild(engine))] : []),
            entry("verify", () => this.verify(engine)),
            ...(sound ? [entry("export", () => this.export(engine))] : []),
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

    export({ name, label }) {
        return this.attempt(async () => {
            const made = await request(this.api, `${path(name)}/export`, { method: "POST" });
            const where = ["output", made.subfolder, made.filename].join("/");
            this.#tell("success", t("exported", { name: label, size: size(made.bytes), where }));
            const link = make("a");
            link.href = this.api.apiURL(`/view?${new URLSearchParams({ filename: made.filename, subfolder: made.subfolder, type: "output" })}`);
            link.download = made.filename;
            link.click();
        });
    }

    import(file) {
        return this.attempt(async () => {
            const { name } = await request(this.api, "/engines/import", { method: "POST", body: file });
            this.#tell("success", t("imported", { name }));
        });
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

    async deleteUnused(engines) {
        const found = unused(engines, UNUSED_DAYS, Date.now());
        const words = { days: UNUSED_DAYS, count: found.length, size: size(found.reduce((sum, { bytes }) => sum + bytes, 0)) };
        if (!found.length) return this.#tell("info", t("noneUnused", words));
        const question = { title: t("deleteUnusedTitle", words), text: t("confirmUnused", words), yes: t("delete"), danger: true };
        if (!(await confirm(question))) return;
        await this.attempt(async () => {
            const { deleted, bytes } = await request(this.api, "/engines/delete_unused", { method: "POST", json: { days: UNUSED_DAYS } });
            this.#deleted(deleted.length, bytes, null);
            await this.load();
        });
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
        this.#tell("info", one ? t("deleted", { name: only.label ?? only.name }) : t("deletedUnused", { count, size: size(bytes) }));
    }

    #tell(severity, words) {
        this.page.toast(severity, t("panel"), words);
    }
}
