// The engines panel: a sidebar tab with the library and the builds. It asks the server when something has happened and
// somebody sees it, and does nothing else by itself.

import { button, make } from "./dom.mjs";
import { PanelActions } from "./panel_actions.mjs";
import { PanelHeader } from "./panel_header.mjs";
import { JobCards } from "./panel_jobs.mjs";
import { EngineRows } from "./panel_rows.mjs";
import { grouped, matching, withJob } from "./panel_words.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";

const PATIENCE = 300;

export class Panel {
    /**
     * @param {any} api ComfyUI's api
     * @param {{toast: (severity: string, summary: string, detail: string) => void, showLog: (job: string) => void,
     *     rebuild: (engine: any) => Promise<boolean>, asked?: () => string[], templates?: () => void}} page
     */
    constructor(api, page) {
        this.api = api;
        this.page = page;
        this.actions = new PanelActions(api, page, () => this.load());
        this.data = { engines: [], bytes: 0, free: 0, folder: "" };
        this.jobs = [];
        this.selected = new Set();
        this.order = "sortName";
        this.late = false; // something happened while nobody saw the page
        this.heard = {
            "hybrid_trt.library": () => this.soon(), reconnected: () => this.soon(),
            "hybrid_trt.build": ({ detail }) => this.hear(detail),
        };
        this.seen = () => this.late && this.soon();
    }

    /** Fill the tab's element. */
    open(element) {
        this.close();
        this.selected.clear();
        const { actions } = this;
        this.header = new PanelHeader({
            draw: () => this.draw(), refresh: () => this.load(), deleteSelected: () => actions.delete(this.#chosen()),
            selectShown: (on) => this.#select(this.#shown().map(({ name }) => name), on),
        });
        this.header.sort.value = this.order;
        this.builds = new JobCards({
            cancel: (job) => actions.cancel(job), log: (job) => this.page.showLog(job.id), clear: () => actions.clearFinished(),
        });
        this.rows = new EngineRows({ select: (name, on) => this.#select([name], on), entries: (engine) => actions.entries(engine) });
        this.none = make("div", "hybrid-trt-none");
        this.root = make("div", "hybrid-trt-panel");
        this.root.append(this.header.element, this.builds.element, this.rows.element, this.none);
        element.replaceChildren(this.root);
        for (const [event, act] of Object.entries(this.heard)) this.api.addEventListener(event, act);
        document.addEventListener("visibilitychange", this.seen);
        this.load();
    }

    /** The tab is no longer shown. */
    close() {
        clearTimeout(this.timer);
        this.timer = this.root = null;
        for (const [event, act] of Object.entries(this.heard)) this.api.removeEventListener(event, act);
        document.removeEventListener("visibilitychange", this.seen);
    }

    /** Ask for the lists soon; many calls in a row ask once, and a page that nobody sees asks when it is seen. */
    soon() {
        this.late = document.hidden;
        if (this.late) return;
        this.timer ??= setTimeout(() => {
            this.timer = null;
            this.load();
        }, PATIENCE);
    }

    /** A job has changed: progress comes with the event, and only an end changes the library. */
    hear(job) {
        const { jobs, ended } = withJob(this.jobs, job);
        this.jobs = jobs;
        if (ended) this.soon();
        this.#drawJobs();
    }

    /** The nodes that wait for their models may be others. */
    waiting() {
        if (this.root) this.#drawJobs();
    }

    /** Ask the server for everything and draw it. */
    async load() {
        await this.actions.attempt(async () => {
            [this.data, this.jobs] = await Promise.all([request(this.api, "/engines"), request(this.api, "/builds")]);
            if (this.root) this.draw();
        });
    }

    draw() {
        const { engines, bytes, free, folder } = this.data, known = new Set(engines.map(({ name }) => name));
        for (const name of this.selected) if (!known.has(name)) this.selected.delete(name);
        this.order = this.header.sort.value;
        const shown = this.#shown(), chosen = this.#chosen();
        this.header.show({ count: engines.length, bytes, free, folder }, {
            count: chosen.length, bytes: chosen.reduce((sum, engine) => sum + engine.bytes, 0), shown: shown.length,
            shownSelected: shown.filter(({ name }) => this.selected.has(name)).length,
        });
        this.#drawJobs();
        this.rows.draw(grouped(shown, this.order), this.selected, this.order);
        this.#drawNothing(shown.length ? "" : engines.length ? "noMatch" : "empty");
    }

    #drawJobs() {
        if (this.root && !document.hidden) this.builds.draw(this.jobs, this.page.asked?.() ?? []);
        else this.late = true;
    }

    /** What stands in the place of the list: how to begin, or that the filter fits nothing. */
    #drawNothing(why) {
        if (this.none.dataset.why === why) return;
        this.none.dataset.why = why;
        const steps = make("ol", "");
        steps.append(...["begin1", "begin2", "begin3"].map((key) => make("li", "", t(key))));
        const begin = [make("strong", "", t("empty")), steps, ...(this.page.templates ? [button("beginTemplates", this.page.templates)] : [])];
        this.none.replaceChildren(...({ empty: begin, noMatch: [make("p", "hybrid-trt-quiet", t("noMatch"))] }[why] ?? []));
    }

    #shown() {
        return matching(this.data.engines, this.header.filter.value);
    }

    #chosen() {
        return this.data.engines.filter(({ name }) => this.selected.has(name));
    }

    #select(names, on) {
        for (const name of names) on ? this.selected.add(name) : this.selected.delete(name);
        this.draw();
    }
}
