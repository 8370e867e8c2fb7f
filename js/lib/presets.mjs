// Profiles under names that people understand: a widget and a menu of the engine nodes. What is saved is the sizes.

import { t } from "./texts.mjs";

/** Widget values by the preset's text key. */
export const PRESETS = {
    presetAny: { min_size: 64, opt_size: 512, max_size: 1024, max_images: 4, max_tokens: 616 },
    presetSd15: { min_size: 512, opt_size: 512, max_size: 768, max_images: 2, max_tokens: 231 },
    presetSd15Wide: { min_size: 256, opt_size: 512, max_size: 1024, max_images: 4, max_tokens: 616 },
    presetSdxl: { min_size: 1024, opt_size: 1024, max_size: 1024, max_images: 1, max_tokens: 231 },
    presetSdxlWide: { min_size: 768, opt_size: 1024, max_size: 1536, max_images: 2, max_tokens: 616 },
};

/**
 * Set a node's sizes; widgets that hear of changes do.
 * @param {{widgets?: {name: string, value: unknown, callback?: (value: unknown) => void}[]}} node
 * @param {Record<string, number>} values
 */
export function applyPreset(node, values) {
    for (const widget of node.widgets ?? []) {
        if (!(widget.name in values)) continue;
        widget.value = values[widget.name];
        widget.callback?.(widget.value);
    }
}

/**
 * The menu entry with all presets.
 * @param {object} node
 * @param {() => void} done called after a preset was applied
 */
export function presetMenu(node, done) {
    const options = Object.entries(PRESETS).map(([key, values]) => ({
        content: t(key),
        callback: () => {
            applyPreset(node, values);
            done();
        },
    }));
    return { content: t("presets"), has_submenu: true, submenu: { options } };
}

/** The key of the preset whose sizes a node has, or null. */
export function presetOf(node) {
    const now = sizesOf(node);
    const same = (values) => Object.entries(values).every(([name, value]) => now[name] === value);
    return Object.keys(PRESETS).find((key) => same(PRESETS[key])) ?? null;
}

/**
 * Add the widget that names a node's sizes; it is in no saved workflow and no prompt.
 * @param {any} node
 * @param {() => void} done called after a preset was applied
 * @returns {() => void} makes the widget say what the sizes are now
 */
export function presetWidget(node, done) {
    const widget = node.addWidget("combo", "size_preset", "", choose, { values: [], serialize: false });
    Object.assign(widget, { serialize: false, label: t("presetLabel"), tooltip: t("presetHint") });

    function sync() {
        const key = presetOf(node);
        widget.value = key ? t(key) : t("presetOwn", sizesOf(node));
        // Vue nodes have a button of their own to unfold what is advanced
        const more = globalThis.LiteGraph?.vueNodesMode ? [] : [t("presetMore")];
        widget.options.values = [...Object.keys(PRESETS).map((name) => t(name)), ...(key ? [] : [widget.value]), ...more];
    }

    function choose(value) {
        const key = Object.keys(PRESETS).find((name) => t(name) === value);
        if (key) applyPreset(node, PRESETS[key]);
        else if (value === t("presetMore") && !node.showAdvanced) node.toggleAdvanced();
        sync();
        done();
    }

    for (const other of node.widgets) if (other.options?.advanced) foldOnCanvas(node, other);
    for (const size of node.widgets.filter(({ name }) => name in PRESETS.presetAny)) follow(size, "callback", sync);
    follow(node, "onConfigure", sync);
    sync();
    return sync;
}

/** Vue nodes fold advanced widgets by themselves; the canvas would only leave them blank. */
function foldOnCanvas(node, widget) {
    let hidden = widget.hidden;
    widget.advanced = true;
    Object.defineProperty(widget, "hidden", {
        configurable: true, enumerable: true,
        get: () => hidden || (!globalThis.LiteGraph?.vueNodesMode && !node.showAdvanced),
        set: (value) => { hidden = value; },
    });
}

/** Call something after a method of an object. */
export function follow(object, method, then) {
    const before = object[method];
    object[method] = function (...given) {
        const result = before?.apply(this, given);
        then();
        return result;
    };
}

function sizesOf(node) {
    const found = (node.widgets ?? []).filter(({ name }) => name in PRESETS.presetAny);
    return Object.fromEntries(found.map(({ name, value }) => [name, value]));
}
