// The pack's settings: what a new engine node starts with, and the library's settings, which the server keeps.
// Nodes of opened workflows keep what they were saved with.

import { make } from "./dom.mjs";
import { valueLabel } from "./labels.mjs";
import { applyPreset, presetName, PRESETS } from "./presets.mjs";
import { request } from "./server.mjs";
import { t } from "./texts.mjs";

const CATEGORY = "Hybrid TRT";
const WIDGETS = {
    when_missing: "HybridTRT.WhenMissing", backend: "HybridTRT.Backend", precision: "HybridTRT.Precision",
    weights: "HybridTRT.Weights",
};

const labelled = (values) => values.map((value) => ({ text: valueLabel(value), value }));

/**
 * As ComfyUI's extensions declare settings; to be asked for once the families have offered their sizes.
 * @param {string[]} backends names of the backends, as the server sends them
 */
export const settings = (backends) => [
    setting("WhenMissing", "If no engine yet", labelled(["auto", "use native", "build now", "build in background"]), "auto"),
    setting("Sizes", "Picture size", Object.keys(PRESETS).map((key) => ({ text: presetName(key), value: key })), "presetFit"),
    setting("Backend", "Backend", backends, "auto"),
    setting("Precision", "Precision", ["auto", "float16", "bfloat16", "float32"], "auto"),
    setting("Weights", "Engine is for", labelled(["built in", "replaceable"]), "built in"),
];

/**
 * Give a new node the values that the settings name; values that its widgets do not offer are left alone.
 * @param {{widgets?: {name: string, value: unknown, options?: {values?: unknown[]}}[]}} node
 * @param {(id: string) => unknown} get a setting's value
 */
export function defaultsFor(node, get) {
    for (const widget of node.widgets ?? []) {
        const value = widget.name in WIDGETS ? get(WIDGETS[widget.name]) : undefined;
        if (value !== undefined && widget.options?.values?.includes?.(value)) widget.value = value;
    }
    applyPreset(node, PRESETS[get("HybridTRT.Sizes")] ?? {});
}

/**
 * Settings that are drawn by ourselves, because the server's library has them and not the user's list of settings.
 * @param {any} api ComfyUI's api
 */
export function librarySettings(api) {
    return [
        librarySetting("LibraryLimit", "Disk space limit (GB)", () => numberField(api, "limit_gb", "limit")),
        librarySetting("BuildMinutes", "Give up a build after (minutes)", () => numberField(api, "build_minutes", "minutes")),
        librarySetting("TensorRTLevel", "TensorRT: optimization level", () => numberField(api, "tensorrt_level", "level")),
        librarySetting("LibraryFolder", "Folder of the engines", () => folderField(api)),
    ];
}

/**
 * A number; what the server says to a new one is shown below it.
 * @param {any} api ComfyUI's api
 * @param {string} name what the server calls it
 * @param {string} text the key of its name for people; with "Hint" behind it, of what it means
 */
function numberField(api, name, text) {
    const field = Object.assign(make("input"), { type: "number", min: "0", step: "any", disabled: true });
    field.setAttribute("aria-label", t(text));
    const say = make("div");
    const show = (text, tone) => Object.assign(say, { textContent: text, className: "hybrid-trt-quiet" }).dataset.tone = tone;
    const exchange = async (options) => {
        try {
            field.value = String((await request(api, "/settings", options))[name]);
            field.disabled = false;
            show(t(options ? "limitKept" : `${text}Hint`), "idle");
        } catch (failure) {
            show(failure.message, "bad");
        }
    };
    field.addEventListener("change", () => exchange({ method: "POST", json: { [name]: field.value === "" ? 0 : Number(field.value) } }));
    field.addEventListener("keydown", (event) => {
        if (event.key !== "Escape") event.stopPropagation(); // no shortcut of the canvas; Escape closes the dialog
    });
    exchange();
    return make("div", "hybrid-trt-setting", field, say);
}

/** The folders with engines, builds go to the first, and how to have another one. */
function folderField(api) {
    const folders = make("div");
    request(api, "/settings").then(
        (answer) => folders.append(...answer.folders.map((path) => make("div", "", path))),
        (failure) => { folders.textContent = failure.message; });
    return make("div", "hybrid-trt-setting", folders, make("div", "hybrid-trt-quiet", t("folderHint")));
}

function librarySetting(id, name, draw) {
    return { id: `HybridTRT.${id}`, name, type: draw, defaultValue: null, category: [CATEGORY, "Engine library", name] };
}

function setting(id, name, options, defaultValue) {
    return {
        id: `HybridTRT.${id}`, name, type: "combo", options, defaultValue, category: [CATEGORY, "New engine nodes", name],
        tooltip: "What a new engine node starts with.",
    };
}
