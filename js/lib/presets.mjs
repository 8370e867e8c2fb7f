// The five numbers of an engine node and the choices that set them. They are all that prompts know.

import { t } from "./texts.mjs";

/** Widget values by the choice's key; all 0 is what fits the model, which Auto begins with. Other choices are families' own. */
export const PRESETS = {
    presetFit: { min_size: 0, opt_size: 0, max_size: 0, max_images: 0, max_tokens: 0 },
};
const AUTO = "presetFit";
const families = {}; // the names by key

/**
 * Offer the choices of the families that the server knows.
 * @param {{key: string, family: string, sizes: Record<string, number>}[]} presets
 */
export function offer(presets) {
    for (const { key, family, sizes } of presets) {
        PRESETS[key] = sizes;
        families[key] = family;
    }
}

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

/** The key of the choice whose numbers a node has, or null. */
export function presetOf(node) {
    return Object.keys(PRESETS).find((key) => sameSizes(sizesOf(node), PRESETS[key])) ?? null;
}

/** Whether two nodes agree in the numbers that both have: a VAE's node has no images and no tokens. */
export function sameSizes(one, other) {
    if (!one || !other) return false;
    return Object.keys(PRESETS[AUTO]).every((name) => !(name in one && name in other) || one[name] === other[name]);
}

/** Call something after a method of an object. */
export function follow(object, method, then) {
    const before = object[method];
    object[method] = function (...given) {
        const result = before?.apply(this, given);
        then(...given);
        return result;
    };
}

/** The five numbers of a node by name. */
export function sizesOf(node) {
    const found = (node.widgets ?? []).filter(({ name }) => name in PRESETS[AUTO]);
    return Object.fromEntries(found.map(({ name, value }) => [name, value]));
}

/**
 * The numbers that a node is sent from outside: by a subgraph's node that shows its widget, or by a primitive.
 * @param {any} node
 * @param {Record<string, any>} inputs the node's inputs in the prompt
 * @returns {Record<string, number>} numbers that are known before the prompt runs
 */
export function numbersFromOutside(node, inputs) {
    const wired = (node.inputs ?? []).filter(({ link, widget }) => link != null && widget?.name in PRESETS[AUTO]);
    const numbers = wired.map(({ widget }) => [widget.name, inputs[widget.name]]);
    return Object.fromEntries(numbers.filter(([, number]) => Number.isFinite(number)));
}

/** A preset's name. */
export function presetName(key) {
    return key === AUTO ? t("sizesAutoFit") : t("presetUsual", { family: families[key] });
}
