// The builds in the engines panel: what runs, what waits, and how the latest ended.

import { arrange, button, make } from "./dom.mjs";
import { anyEnded, jobLines, LIVE, shownJobs } from "./panel_words.mjs";
import { t } from "./texts.mjs";
import { tone } from "./words.mjs";

/** The list of builds: what runs, what waits, and how the latest ended. */
export class JobCards {
    /** @param {{cancel: (job: any) => void, log: (job: any) => void, clear: () => void}} actions */
    constructor(actions) {
        this.actions = actions;
        this.element = make("div", "hybrid-trt-panel-builds");
        this.clear = button("clearFinished", actions.clear);
        this.head = make("div", "hybrid-trt-row hybrid-trt-between", make("h4", "", t("builds")), this.clear);
        this.cards = new Map(); // job id -> its card, kept while it is shown: progress takes no button away
    }

    /**
     * @param {any[]} jobs the oldest first
     * @param {string[]} asked the names of nodes whose builds wait for ComfyUI to load their models
     */
    draw(jobs, asked) {
        const shown = shownJobs(jobs), known = this.cards;
        let before = 0;
        this.clear.hidden = !anyEnded(jobs);
        this.cards = new Map(shown.map((job) => [job.id, known.get(job.id) ?? this.#made(job)]));
        for (const job of shown) this.#say(this.cards.get(job.id), job, LIVE.includes(job.state) ? before++ : 0);
        const waiting = asked.map((name) => written(card("busy"), [`${name} · … ${t("asked")}`, t("askedHint")]));
        const cards = [...this.cards.values()].map(({ element }) => element);
        arrange(this.element, shown.length || asked.length ? [this.head, ...cards, ...waiting] : []);
    }

    #made(job) {
        const cancel = button("cancel", () => this.actions.cancel(job)), log = button("log", () => this.actions.log(job));
        const row = make("div", "hybrid-trt-row", cancel, log), element = card(tone(job.state), row);
        return { element, row, cancel, log };
    }

    #say({ element, row, cancel, log }, job, before) {
        element.dataset.tone = tone(job.state);
        element.title = job.wanted ?? "";
        const lines = jobLines(job, before);
        element.classList.toggle("hybrid-trt-one-line", lines.length === 1);
        written(element, lines, row);
        cancel.hidden = !LIVE.includes(job.state);
        log.hidden = job.state === "queued";
    }
}

function card(colour, ...content) {
    const made = make("div", "hybrid-trt-card", ...content);
    made.dataset.tone = colour;
    return made;
}

/** A card with these lines, and what stays below them. */
function written(element, [head, ...lines], ...below) {
    arrange(element, [make("strong", "", head), ...lines.map((line) => make("div", "hybrid-trt-quiet", line)), ...below]);
    return element;
}
