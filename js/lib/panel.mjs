// The engines panel: a sidebar tab with the library and the builds.

import { confirm } from "./dialog.mjs";
import { engineLines, jobLines, matching, shownJobs, tone, unused } from "./panel_words.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";
import { size } from "./words.mjs";

const EVENTS = ["hybrid_trt.library", "hybrid_trt.build", "reconnected"];
const PATIENCE = 300;
const UNUSED_DAYS = 30;

export class Panel {
    /**
     * @param {any} api ComfyUI's api
     * @param {{toast: (severity: string, summary: string, detail: string) => void, showLog: (job: string) => void,
     *     rebuild: (engine: any) => Promise<boolean>}} actions
     */
    constructor(api, actions) {
        this.api = api;
        this.actions = actions;
        this.data = { engines: [], bytes: 0, free: 0, folder: "" };
        this.jobs = [];
        this.changed = () => {
            clearTimeout(this.timer);
            this.timer = setTimeout(() => this.load(), PATIENCE);
        };
    }

    /** Fill the tab's element. */
    open(element) {
        this.close();
        this.use = make("div", "hybrid-trt-quiet");
        this.filter = make("input", "");
        this.filter.placeholder = t("filter");
        this.filter.addEventListener("input", () => this.draw());
        this.filter.addEventListener("keydown", (event) => event.stopPropagation());
        this.file = make("input", "");
        Object.assign(this.file, { type: "file", accept: ".trtengine", hidden: true });
        this.file.addEventListener("change", () => this.import());
        this.builds = make("div", "hybrid-trt-panel-builds");
        this.engines = make("div", "hybrid-trt-panel-engines");
        this.unused = button("deleteUnused", () => this.#deleteUnused());
        this.unused.textContent = t("deleteUnused", { days: UNUSED_DAYS });
        this.unused.hidden = true;
        const tools = make("div", "hybrid-trt-row");
        tools.append(this.filter, button("refresh", () => this.load()), button("import", () => this.file.click()), this.unused, this.file);
        this.root = make("div", "hybrid-trt-panel");
        this.root.append(make("h3", "", t("panel")), this.use, tools, this.builds, this.engines);
        element.replaceChildren(this.root);
        for (const event of EVENTS) this.api.addEventListener(event, this.changed);
        this.load();
    }

    /** The tab is no longer shown. */
    close() {
        clearTimeout(this.timer);
        for (const event of EVENTS) this.api.removeEventListener(event, this.changed);
    }

    /** Ask the server for everything and draw it. */
    async load() {
        await this.#try(async () => {
            [this.data, this.jobs] = await Promise.all([request(this.api, "/engines"), request(this.api, "/builds")]);
            this.draw();
        });
    }

    draw() {
        const { engines, bytes, free, folder } = this.data;
        this.use.textContent = t("use", { count: engines.length, size: size(bytes), free: size(free) });
        this.use.title = folder;
        this.unused.hidden = !engines.length;
        const jobs = shownJobs(this.jobs);
        this.builds.replaceChildren(...(jobs.length ? [make("h4", "", t("builds"))] : []), ...jobs.map((job) => this.#job(job)));
        const found = matching(engines, this.filter.value);
        const none = make("div", "hybrid-trt-quiet", t(engines.length ? "noMatch" : "empty"));
        this.engines.replaceChildren(make("h4", "", t("engines")), ...(found.length ? found.map((e) => this.#engine(e)) : [none]));
    }

    async import() {
        const [file] = this.file.files;
        this.file.value = "";
        if (!file) return;
        await this.#try(async () => {
            const { name } = await request(this.api, "/engines/import", { method: "POST", body: file });
            this.actions.toast("success", t("panel"), t("imported", { name }));
        });
    }

    #job(job) {
        const card = this.#card(jobLines(job), job.state);
        const row = make("div", "hybrid-trt-row");
        if (["running", "queued"].includes(job.state))
            row.append(button("cancel", () => this.#try(() => request(this.api, `/builds/${job.id}/cancel`, { method: "POST" }))));
        row.append(button("log", () => this.actions.showLog(job.id)));
        card.append(row);
        return card;
    }

    #engine(engine) {
        const card = this.#card(engineLines(engine), engine.state);
        card.title = engine.name;
        const row = make("div", "hybrid-trt-row");
        row.append(button("verify", () => this.#verify(engine)));
        if (engine.label) row.append(button("rebuild", () => this.#rebuild(engine)));
        if (engine.label) row.append(button("export", () => this.#export(engine)));
        row.append(button("delete", () => this.#delete(engine)));
        card.append(row);
        return card;
    }

    #card([head, ...lines], state) {
        const card = make("div", "hybrid-trt-card");
        card.dataset.tone = tone(state);
        card.append(make("strong", "", head), ...lines.map((line) => make("div", "hybrid-trt-quiet", line)));
        return card;
    }

    async #verify({ name, label }) {
        await this.#try(async () => {
            const { ok, text } = await request(this.api, `${path(name)}/verify`, { method: "POST" });
            const words = t(ok ? "verified" : "damaged", { name: label ?? name, text });
            this.actions.toast(ok ? "success" : "error", t("panel"), words);
        });
    }

    async #rebuild(engine) {
        const found = await this.actions.rebuild(engine);
        const node = engine.kind === "unet" ? "TRT UNet Engine" : "TRT ControlNet Engine";
        this.actions.toast("info", t("panel"), t(found ? "rebuildStarted" : "rebuildWhere", { label: engine.label, node }));
    }

    async #export({ name, label }) {
        await this.#try(async () => {
            const made = await request(this.api, `${path(name)}/export`, { method: "POST" });
            this.actions.toast("success", t("panel"), t("exported", { name: label, size: size(made.bytes) }));
            const link = make("a", "");
            const query = new URLSearchParams({ filename: made.filename, subfolder: made.subfolder, type: "output" });
            link.href = this.api.apiURL(`/view?${query}`);
            link.download = made.filename;
            link.click();
        });
    }

    async #delete({ name, label, bytes }) {
        if (!(await confirm(t("confirm", { name: label ?? name, size: size(bytes) })))) return;
        await this.#try(async () => {
            await request(this.api, path(name), { method: "DELETE" });
            this.actions.toast("info", t("panel"), t("deleted", { name: label ?? name }));
            await this.load();
        });
    }

    async #deleteUnused() {
        const found = unused(this.data.engines, UNUSED_DAYS, Date.now());
        const words = { days: UNUSED_DAYS, count: found.length, size: size(found.reduce((sum, { bytes }) => sum + bytes, 0)) };
        if (!found.length) return this.actions.toast("info", t("panel"), t("noneUnused", words));
        if (!(await confirm(t("confirmUnused", words)))) return;
        await this.#try(async () => {
            const { deleted, bytes } = await request(this.api, "/engines/delete_unused", { method: "POST", json: { days: UNUSED_DAYS } });
            this.actions.toast("info", t("panel"), t("deletedUnused", { count: deleted.length, size: size(bytes) }));
            await this.load();
        });
    }

    async #try(act) {
        try {
            await act();
        } catch (failure) {
            this.actions.toast("error", t("failedAction"), failure.message);
        }
    }
}

const path = (name) => `/engines/${encodeURIComponent(name)}`;

function make(tag, name, text) {
    const part = document.createElement(tag);
    if (name) part.className = name;
    if (text !== undefined) part.textContent = text;
    return part;
}

function button(key, act) {
    const made = make("button", "", t(key));
    made.addEventListener("click", act);
    return made;
}
