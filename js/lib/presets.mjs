// Profiles under names that people understand: a widget and a menu of the engine nodes. What is saved is the sizes.

import { t } from "./texts.mjs";

/** Widget values by the preset's text key. */
export const PRESETS = {
    presetFit: { min_size: 0, opt_size: 0, max_size: 0, max_images: 0, max_tokens: 0 },
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
    const set = (node.widgets ?? []).filter(({ name }) => name in values);
    for (const widget of set) widget.value = values[widget.name];
    for (const widget of set) widget.callback?.(widget.value); // who hears of one finds all of them right
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

/**
 * The sizes that a node asks for, with what fits its model in the place of zeros; as the server's `profile_of`.
 * @param {Record<string, number>} given min_size, opt_size, max_size, max_images
 * @param {Record<string, any> | undefined} fits what fits the model, or nothing when that is not known yet
 * @returns {Record<string, number> | null} null when it cannot be told
 */
export function meant({ min_size, opt_size, max_size, max_images }, fits) {
    const numbers = [min_size, opt_size, max_size, max_images];
    if (!numbers.every(Number.isFinite)) return null;
    if (numbers.every((number) => number > 0)) return { min_size, opt_size, max_size, max_images };
    if (!fits) return null;
    const sizes = numbers.slice(0, 3).filter((size) => size > 0);
    const low = min_size || Math.min(fits.min_size, fits.max_size, ...sizes);
    const high = max_size || Math.max(fits.max_size, low, ...sizes);
    return {
        min_size: low, opt_size: opt_size || Math.min(Math.max(fits.opt_size, low), high), max_size: high,
        max_images: max_images || fits.max_images,
    };
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
 * @returns {(fits: Record<string, any>) => void} tells the widget what fits the node's model
 */
export function presetWidget(node, done) {
    const widget = node.addWidget("combo", "size_preset", "", choose, { values: [], serialize: false });
    Object.assign(widget, { serialize: false, label: t("presetLabel"), tooltip: t("presetHint") });

    let fits;

    function label(key) {
        return key === "presetFit" && fits?.family ? t("presetFitOf", fits) : t(key);
    }

    function sync() {
        const key = presetOf(node), sizes = sizesOf(node);
        widget.value = key ? label(key) : t("presetOwn", meant(sizes, fits) ?? sizes);
        // Vue nodes have a button of their own to unfold what is advanced
        const more = globalThis.LiteGraph?.vueNodesMode ? [] : [t("presetMore")];
        widget.options.values = [...Object.keys(PRESETS).map(label), ...(key ? [] : [widget.value]), ...more];
    }

    function choose(value) {
        const key = Object.keys(PRESETS).find((name) => label(name) === value);
        if (key) applyPreset(node, PRESETS[key]);
        else if (value === t("presetMore") && !node.showAdvanced) node.toggleAdvanced();
        sync();
        done();
    }

    for (const other of node.widgets) if (other.options?.advanced) foldOnCanvas(node, other);
    for (const size of node.widgets.filter(({ name }) => name in PRESETS.presetAny)) follow(size, "callback", sync);
    follow(node, "onConfigure", sync);
    sync();
    return (known) => {
        if (JSON.stringify(known) === JSON.stringify(fits)) return;
        fits = known;
        sync();
    };
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

/** The five numbers of a node by name. */
export function sizesOf(node) {
    const found = (node.widgets ?? []).filter(({ name }) => name in PRESETS.presetAny);
    return Object.fromEntries(found.map(({ name, value }) => [name, value]));
}
