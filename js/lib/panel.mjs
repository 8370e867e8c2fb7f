// The engines panel: a sidebar tab with the library and the builds. It asks the server when something has happened and
// somebody sees it, and does nothing else by itself.

import { confirm, showText } from "./dialog.mjs";
import { arrange, button, make } from "./dom.mjs";
import { NODE_FOR } from "./node_names.mjs";
import { openMenu } from "./menu.mjs";
import { JobCards } from "./panel_builds.mjs";
import { deleteQuestion, engineRow, grouped, matching, SORT_KEYS, withJob } from "./panel_words.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";
import { shortName, size, tone } from "./words.mjs";

const PATIENCE = 300;
const path = (name) => `/engines/${encodeURIComponent(name)}`;

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
        this.news = new Map(); // job id -> the last event of it, and when that came
        this.late = false; // something happened while nobody saw the page
        this.heard = {
            "hybrid_trt.library": () => this.soon(), execution_success: () => this.soon(), reconnected: () => this.soon(),
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
            draw: () => this.draw(), refresh: () => this.load(), accelerate: () => this.page.accelerate(),
            doctor: () => actions.doctor(), deleteSelected: () => actions.delete(this.#chosen()),
            deleteOutdated: () => actions.delete(this.data.engines.filter(({ outdated }) => outdated)),
            selectShown: (on) => this.#select(this.#shown().map(({ name }) => name), on),
        });
        this.header.sort.value = this.order;
        this.builds = new JobCards({
            cancel: (job) => actions.post("cancel", `/builds/${job.id}/cancel`), log: (job) => this.page.showLog(job.id),
            clear: () => actions.post("clearFinished", "/builds/clear"),
        });
        this.rows = new EngineRows({ select: (name, on) => this.#select([name], on), entries: (engine) => actions.entries(engine) });
        this.none = make("div", "hybrid-trt-none");
        this.root = make("div", "hybrid-trt-panel", this.header.element, this.builds.element, this.rows.element, this.none);
        element.replaceChildren(this.root);
        this.waiting();
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
        this.news.set(job.id, [job, performance.now()]);
        const { jobs, ended } = withJob(this.jobs, job);
        this.jobs = jobs;
        if (ended) this.soon();
        this.#drawJobs();
    }

    /** The graph with this id was opened: what was ticked beside another one is forgotten. */
    opened(graph) {
        if (graph !== this.graph) this.selected.clear();
        this.graph = graph;
        if (this.root) this.draw();
    }

    /** The workflow has other nodes now, or other nodes wait for their models. */
    waiting() {
        if (this.root) this.#drawJobs();
        if (this.root) this.header.offer.hidden = !this.page.offers?.(); // for a workflow that has an engine node
        if (this.root && this.why) this.#drawNothing(this.why);
    }

    /** Ask the server for everything and draw it. */
    async load() {
        await this.actions.attempt("refresh", async () => {
            const asked = performance.now();
            [this.data, this.jobs] = await Promise.all([request(this.api, "/engines"), request(this.api, "/builds")]);
            for (const [job, heard] of this.news.values()) // the answer may be older
                if (heard > asked) this.jobs = withJob(this.jobs, job).jobs;
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
        this.header.showOutdated(engines.filter(({ outdated }) => outdated));
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
        const begins = this.header.offer.hidden ? [] : ["begin1"], shown = [why, ...begins].join(" ");
        this.why = why;
        if (this.none.dataset.why === shown) return;
        this.none.dataset.why = shown;
        const steps = make("ol", "", ...[...begins, "begin2", "begin3"].map((key) => make("li", "", t(key))));
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

/** Actions on engines. Each ends in a message: what happened, or why it did not. */
class PanelActions {
    /** `page` is as in Panel; `load` asks for the lists again. */
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
        return this.attempt("verify", async () => {
            const { ok, text } = await request(this.api, `${path(name)}/verify`, { method: "POST" });
            this.#tell(ok ? "success" : "error", t(ok ? "verified" : "damaged", { name: shortName(label ?? name), text }));
        });
    }

    /** Show the report for support, from its beginning on. */
    doctor() {
        return this.attempt("doctor", async () => {
            const { text } = await request(this.api, "/doctor");
            showText(t("doctor"), text.split("\n"), false);
        });
    }

    async rebuild(engine) {
        const found = await this.page.rebuild(engine);
        const node = window.LiteGraph.registered_node_types[NODE_FOR[engine.kind]]?.title;
        this.#tell("info", t(found ? "rebuildStarted" : "rebuildWhere", { label: engine.label, node }));
    }

    /** Delete engines once that is confirmed; an engine that cannot be deleted does not keep the other ones. */
    async delete(engines) {
        if (!engines.length || !(await confirm(deleteQuestion(engines)))) return;
        const gone = [];
        await this.attempt("delete", async () => {
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

    post(what, route) {
        return this.attempt(what, () => request(this.api, route, { method: "POST" }));
    }

    /** Do something, named by a text's key; what it throws becomes a message. */
    async attempt(what, act) {
        try {
            await act();
        } catch (failure) {
            this.#tell("error", t("failedAction", { action: t(what), why: failure.message }));
        }
    }

    #deleted(count, bytes, only) {
        const one = count === 1 && only;
        this.#tell("info", one ? t("deleted", { name: shortName(only.label ?? only.name) }) : t("deletedMany", { count, size: size(bytes) }));
    }

    #tell(severity, words) {
        this.page.toast(severity, t("panel"), words);
    }
}

/** The head, which stays while the list scrolls: totals, filter and order, and actions on many engines. */
class PanelHeader {
    /**
     * @param {{draw: () => void, refresh: () => void, accelerate: () => void, doctor: () => void, deleteSelected: () => void,
     *     deleteOutdated: () => void, selectShown: (on: boolean) => void}} actions
     */
    constructor(actions) {
        this.use = make("div", "hybrid-trt-quiet");
        this.filter = make("input");
        Object.assign(this.filter, { placeholder: t("filter"), type: "search" });
        this.filter.setAttribute("aria-label", t("filter"));
        this.filter.addEventListener("input", actions.draw);
        this.filter.addEventListener("keydown", (event) => event.stopPropagation());
        this.sort = make("select", "", ...SORT_KEYS.map((key) => Object.assign(make("option", "", t(key)), { value: key })));
        this.sort.setAttribute("aria-label", t("sort"));
        this.sort.addEventListener("change", actions.draw);
        this.find = make("div", "hybrid-trt-row", this.filter, this.sort);
        this.offer = button("accelerate", actions.accelerate);
        const tools = make("div", "hybrid-trt-row", button("refresh", actions.refresh), this.offer);
        const between = (...parts) => make("div", "hybrid-trt-row hybrid-trt-between", ...parts);
        const title = between(make("h3", "", t("panel")), button("doctor", actions.doctor));
        this.outdated = between(make("span", "hybrid-trt-quiet"), button("deleteEngine", actions.deleteOutdated));
        this.element = make("header", "hybrid-trt-panel-head", title, this.use, this.outdated, this.find, tools, this.#selection(actions));
        this.showOutdated([]);
        this.bar.hidden = true; // until it is known what there is
    }

    /**
     * @param {{count: number, bytes: number, free: number, folder: string}} all
     * @param {{count: number, bytes: number, shown: number, shownSelected: number}} chosen
     */
    show(all, chosen) {
        this.use.textContent = t(all.count === 1 ? "useOne" : "use", { count: all.count, size: size(all.bytes), free: size(all.free) });
        this.use.title = all.folder;
        this.find.hidden = this.bar.hidden = !all.count;
        this.all.checked = chosen.shown > 0 && chosen.shownSelected === chosen.shown;
        this.all.indeterminate = chosen.shownSelected > 0 && !this.all.checked;
        this.count.textContent = chosen.count ? t("selected", { count: chosen.count, size: size(chosen.bytes) }) : t("selectAll");
        this.delete.hidden = !chosen.count;
    }

    /** Offer to delete engines that another version of torch, TensorRT or this pack has made for this GPU. */
    showOutdated(engines) {
        const bytes = engines.reduce((sum, engine) => sum + engine.bytes, 0);
        this.outdated.hidden = !engines.length;
        this.outdated.firstChild.textContent = t("outdated", { count: engines.length, size: size(bytes) });
    }

    #selection(actions) {
        this.all = make("input");
        this.all.type = "checkbox";
        this.all.addEventListener("change", () => actions.selectShown(this.all.checked));
        this.count = make("span", "hybrid-trt-quiet");
        this.delete = button("deleteSelected", actions.deleteSelected);
        this.delete.classList.add("hybrid-trt-danger");
        this.bar = make("div", "hybrid-trt-row hybrid-trt-selection", make("label", "hybrid-trt-row", this.all, this.count), this.delete);
        return this.bar;
    }
}

/** The list of engines: a section per model, two lines per engine with a box to select it and a menu. */
class EngineRows {
    /**
     * @param {{select: (name: string, on: boolean) => void, entries: (engine: any) => {label: string, act: () => void}[]}} actions
     */
    constructor(actions) {
        this.actions = actions;
        this.element = make("div", "hybrid-trt-panel-engines");
        this.rows = new Map(); // name -> its row, kept while the engine says the same
        this.sections = new Map(); // label -> the section of a model
    }

    /** Show `groups` (see panel_words), with the names in `selected` ticked, sorted by `order`. */
    draw(groups, selected, order) {
        this.order = order;
        const before = this.rows, sections = this.sections;
        this.rows = new Map();
        this.sections = new Map(groups.map(({ label }) => [label, sections.get(label) ?? section(label)]));
        arrange(this.element, groups.map((group) => this.#section(group, selected, before)));
    }

    #section({ label, engines, bytes }, selected, before) {
        const { element, head, count } = this.sections.get(label);
        count.textContent = engines.length > 1 ? t("groupOf", { count: engines.length, size: size(bytes) }) : "";
        arrange(element, [head, ...engines.map((engine) => this.#row(engine, selected.has(engine.name), before))]);
        return element;
    }

    #row(engine, on, before) {
        const says = JSON.stringify([engine, this.order]), old = before.get(engine.name);
        const row = old?.says === says ? old : { says, ...this.#make(engine) };
        row.box.checked = on;
        this.rows.set(engine.name, row);
        return row.card;
    }

    #make(engine) {
        const words = engineRow(engine, this.order), name = [engine.label, words.title].filter(Boolean).join(", ");
        const card = make("div", "hybrid-trt-card hybrid-trt-engine");
        card.dataset.tone = tone(engine.state);
        card.dataset.engine = engine.name;
        card.title = words.details.join("\n");
        const box = make("input");
        box.type = "checkbox";
        box.setAttribute("aria-label", t("select", { name }));
        box.addEventListener("change", () => this.actions.select(engine.name, box.checked));
        const text = make("div", "hybrid-trt-two-lines", make("strong", "", words.title), make("div", "hybrid-trt-quiet", words.meta));
        const menu = make("button", "hybrid-trt-more", "⋯");
        menu.type = "button";
        menu.setAttribute("aria-label", t("menuOf", { name }));
        menu.setAttribute("aria-haspopup", "menu");
        menu.setAttribute("aria-expanded", "false");
        menu.addEventListener("click", () => openMenu(menu, this.actions.entries(engine)));
        card.append(box, text, menu);
        return { card, box };
    }
}

function section(label) {
    const element = make("section", "hybrid-trt-group"), head = make("h5", "");
    element.setAttribute("aria-label", label);
    const name = make("span", "hybrid-trt-group-name", shortName(label)), count = make("span", "hybrid-trt-quiet");
    name.title = label;
    head.append(name, count);
    return { element, head, count };
}
