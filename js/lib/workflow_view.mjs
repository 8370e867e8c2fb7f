// The engines of the open workflow in one place: what is missing, one button that builds it all, one bar, one cancel.

import { arrange, make, part } from "./dom.mjs";
import { t } from "./texts.mjs";
import { needs, progress, usesOf } from "./workflow.mjs";
import { about, BUSY, shortName } from "./words.mjs";

/** Shown in the panel, with a line for each node, and on report nodes, without. */
export class WorkflowView {
    /**
     * @param {import("./tracker.mjs").Tracker} tracker
     * @param {{buildAll: () => void, cancelAll: (views: any[]) => void, jump?: (node: any) => void}} actions
     *     with `jump` each node has a line that leads to it
     */
    constructor(tracker, actions) {
        this.tracker = tracker;
        this.actions = actions;
        this.batch = new Set(); // the keys of the builds that are waited for, and of builds that ended meanwhile
        this.weights = new Map();
        this.lines = new WeakMap(); // view -> its line
        this.element = make("div", "hybrid-trt-workflow");
        this.head = part(this.element, "div", "hybrid-trt-title");
        this.progress = part(this.element, "div", "hybrid-trt-workflow-progress");
        this.bar = part(part(this.progress, "div", "hybrid-trt-bar"), "div");
        this.left = part(this.progress, "span", "hybrid-trt-quiet"); // beside the bar: it comes and goes
        this.button = part(this.element, "button", "hybrid-trt-log");
        this.button.addEventListener("click", () => this.#press());
        this.list = part(this.element, "div", "hybrid-trt-workflow-nodes");
        this.draw = this.draw.bind(this);
        tracker.watchers.add(this.draw);
        this.draw();
    }

    /** It is no longer shown. */
    close() {
        this.tracker.watchers.delete(this.draw);
    }

    draw() {
        const views = this.tracker.present.filter(({ state }) => !["off", "unwired"].includes(state.state));
        const uses = new Map(views.flatMap((view) => usesOf(view.state).map((use) => [use.key || view, use])));
        const found = needs([...uses.values()]);
        const waiting = [...uses].filter(([, { state }]) => BUSY.includes(state)).map(([key]) => key);
        this.batch = new Set(waiting.length ? [...this.batch, ...waiting].filter((key) => uses.has(key)) : []);
        if (!waiting.length) this.weights.clear();
        this.element.hidden = !found.total;
        this.element.dataset.tone = waiting.length ? "busy" : found.missing ? "warn" : "good";
        const { jump } = this.actions; // without it the last run stands above, on a report
        const words = !jump && !found.missing && !found.busy && !found.unable ? t(found.ready === 1 ? "nowOneReady" : "nowReady", found) : headline(found, this.batch.size);
        this.head.textContent = jump ? words : t("now", { words });
        this.progress.hidden = !waiting.length;
        this.left.textContent = found.seconds > 0 ? about(found.seconds) : "";
        this.bar.style.width = `${100 * progress([...this.batch].map((key) => uses.get(key)), this.weights)}%`;
        this.button.hidden = !waiting.length && !found.missing;
        this.button.dataset.act = waiting.length ? "cancel" : "build";
        this.button.textContent = waiting.length ? t("cancelAll") : offer(found);
        if (this.actions.jump) arrange(this.list, views.map((view) => this.#line(view)));
    }

    #press() {
        const views = this.tracker.present;
        const waiting = views.filter(({ state }) => BUSY.includes(state.state));
        if (waiting.length) this.actions.cancelAll(waiting);
        else this.actions.buildAll();
    }

    #line(view) {
        if (!this.lines.has(view)) this.lines.set(view, this.#made(view));
        const line = this.lines.get(view), { label } = view.state;
        line.dataset.tone = view.view.tone;
        line.title = label ? `${label}\n${t("jump")}` : t("jump");
        [view.node.title, label ? shortName(label) : "", view.view.title].forEach((text, i) => { line.children[i].textContent = text; });
        return line;
    }

    #made(view) {
        const spans = ["", "hybrid-trt-model", "hybrid-trt-title"].map((name) => make("span", name));
        const line = make("button", "hybrid-trt-workflow-node", ...spans);
        line.addEventListener("click", () => this.actions.jump(view.node));
        return line;
    }
}

/** One line for all engines of a workflow. */
export function headline({ ready, missing, busy, total, unable, building }, batch) {
    if (busy && !building) return t("allWait", { count: busy });
    if (busy) return t("allBusy", { number: Math.max(1, batch - busy + 1), batch });
    if (!missing && unable) return t("readyBeside", { ready, unable });
    if (!missing) return t(ready === 1 ? "oneReady" : "allReady", { ready });
    return t(total === 1 ? "onlyMissing" : missing === 1 ? "oneMissing" : "allMissing", { missing, total });
}

/** What the button for all does; some engines may be there already. */
export function offer({ missing, seconds, unsure }) {
    const words = t(missing === 1 ? "buildOne" : unsure ? "buildUpTo" : "buildAll", { count: missing });
    return seconds > 0 ? t("timed", { words, time: about(seconds) }) : words;
}
