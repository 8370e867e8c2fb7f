// What TRT Sampler Patch and TRT Report say after a run, in the way that engine nodes show their state.

import { t } from "./texts.mjs";

export const TEXT_NODES = ["TRTSamplerPatch", "TRTReport"];
const HEIGHT = 92;

/**
 * Show a node's text below its settings, amber when something ran native.
 * @param {any} node
 * @param {HTMLElement[]} above what stands above the text
 */
export function showRuns(node, above = []) {
    const element = document.createElement("div");
    element.className = "hybrid-trt-status";
    element.append(...above);
    const lines = element.appendChild(document.createElement("div"));
    lines.className = "hybrid-trt-lines hybrid-trt-report";
    const widget = node.addDOMWidget("run_text", "hybrid_trt_text", element, {
        serialize: false, hideOnZoom: false, getMinHeight: () => HEIGHT,
        getValue: () => lines.textContent, setValue: () => {},
    });
    widget.serialize = false;
    const show = (text, tone) => {
        lines.textContent = text;
        element.dataset.tone = tone;
        node.setDirtyCanvas?.(true, true);
    };
    show(t("notRun"), "idle");
    const before = node.onExecuted;
    node.onExecuted = function (output, ...more) {
        before?.call(this, output, ...more);
        if (output?.text?.length) show(output.text.join("\n"), toneOf(output));
    };
}

/** Good when all ran on engines, a warning when something ran native. */
export function toneOf({ native }) {
    if (typeof native?.[0] !== "boolean") return "idle";
    return native[0] ? "warn" : "good";
}
