// What TRT Sampler Patch, TRT Report and TRT Compare say after a run, in the way that engine nodes show their state.

import { COMPARE, REPORT, SAMPLER_PATCH } from "./node_names.mjs";
import { follow } from "./presets.mjs";
import { StatusBox } from "./status_box.mjs";
import { t } from "./texts.mjs";

export const TEXT_NODES = [SAMPLER_PATCH, REPORT, COMPARE];
const SIZE = [300, 170], COMPARED = [300, 380]; // with room for a picture
/** What shows a node's output. */
const tellers = new WeakMap();
const TITLES = { good: "allOnEngines", warn: "someNative", idle: "noRunYet" };

/**
 * Show a node's text below its settings, amber when something ran native.
 * @param {any} node
 * @param {HTMLElement[]} above what stands between headline and text
 */
export function showRuns(node, above = []) {
    const box = new StatusBox(node, "run_text", "hybrid_trt_text");
    box.element.classList.add("hybrid-trt-report");
    box.head.after(...above);
    box.show("idle", t("noRunYet"), [t("notRun")]);
    tellers.set(node, (output) => {
        if (!output?.text?.length) return;
        const tone = toneOf(output), lines = output.text.join("\n").split("\n");
        const answered = output.report && tone !== "idle"; // a report's first line is its answer
        box.show(tone, answered ? lastRun(lines.shift()) : t(tone === "idle" ? "noCalls" : TITLES[tone]), lines);
    });
    follow(node, "onExecuted", tellers.get(node));
    node.setSize(SIZE.map((size, i) => Math.max(size, node.computeSize()[i])));
}

/** Show how far two pictures are from each other: amber where that can be seen, red where one is broken. */
export function showComparison(node) {
    const box = new StatusBox(node, "compare_text", "hybrid_trt_text");
    box.show("idle", t("noRunYet"), [t("notCompared")]);
    tellers.set(node, ({ text, tone } = {}) => {
        if (!text?.length) return;
        const [title, ...lines] = text.join("\n").split("\n");
        box.show(tone?.[0] ?? "idle", title, lines);
    });
    follow(node, "onExecuted", tellers.get(node));
    node.setSize(COMPARED.map((size, i) => Math.max(size, node.computeSize()[i])));
}

/**
 * Show what the page has kept of earlier runs: it makes all nodes anew for another tab and back, and for undo.
 * @param {any} root the outermost graph
 * @param {Record<string, any>} outputs by the page's locators: "5", or "<id of the subgraph>:5"
 */
export function showKept(root, outputs) {
    for (const graph of [root, ...(root?.subgraphs?.values() ?? [])])
        for (const node of graph?.nodes ?? []) tellers.get(node)?.(outputs?.[graph === root ? node.id : `${graph.id}:${node.id}`]);
}

/** A report's first line as what the last run did: since then engines may have come or gone. */
const lastRun = (line) => t("lastRun", { words: line.replace(/^Accelerated: /, "accelerated ") });

/** Good when all ran on engines, a warning when something ran native. */
export function toneOf({ native }) {
    if (typeof native?.[0] !== "boolean") return "idle";
    return native[0] ? "warn" : "good";
}
