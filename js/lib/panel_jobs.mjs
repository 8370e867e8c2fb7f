// The panel's list of builds: what runs, what waits, and how the latest ended.

import { button, make } from "./dom.mjs";
import { anyEnded, jobLines, shownJobs, tone } from "./panel_words.mjs";
import { t } from "./texts.mjs";

const LIVE = ["running", "queued"];

export class JobCards {
    /** @param {{cancel: (job: any) => void, log: (job: any) => void, clear: () => void}} actions */
    constructor(actions) {
        this.actions = actions;
        this.element = make("div", "hybrid-trt-panel-builds");
    }

    /**
     * @param {any[]} jobs the oldest first
     * @param {string[]} asked the names of nodes whose builds wait for ComfyUI to load their models
     */
    draw(jobs, asked) {
        const shown = shownJobs(jobs), focus = this.#focus();
        this.element.replaceChildren();
        if (!shown.length && !asked.length) return;
        const head = make("div", "hybrid-trt-row hybrid-trt-between");
        head.append(make("h4", "", t("builds")));
        if (anyEnded(jobs)) head.append(button("clearFinished", this.actions.clear));
        let before = 0;
        const cards = shown.map((job) => this.#card(job, LIVE.includes(job.state) ? before++ : 0));
        this.element.append(head, ...cards, ...asked.map((name) => card([`${name} · … ${t("asked")}`, t("askedHint")], "busy")));
        if (focus) this.element.querySelector(focus)?.focus();
    }

    #card(job, before) {
        const made = card(jobLines(job, before), tone(job.state));
        const row = made.appendChild(make("div", "hybrid-trt-row"));
        if (LIVE.includes(job.state)) row.append(marked(button("cancel", () => this.actions.cancel(job)), job, "cancel"));
        if (job.state !== "queued") row.append(marked(button("log", () => this.actions.log(job)), job, "log"));
        return made;
    }

    /** How to find the button that has the focus again once it is drawn anew. */
    #focus() {
        const does = this.element.contains(document.activeElement) && document.activeElement.dataset.does;
        return does ? `[data-does="${does}"]` : null;
    }
}

function card([head, ...lines], colour) {
    const made = make("div", "hybrid-trt-card");
    made.dataset.tone = colour;
    made.append(make("strong", "", head), ...lines.map((line) => make("div", "hybrid-trt-quiet", line)));
    return made;
}

function marked(made, job, what) {
    made.dataset.does = `${what} ${job.id}`;
    return made;
}
