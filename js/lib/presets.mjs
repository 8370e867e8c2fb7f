// The five numbers of an engine node: the choices that set them, and what they mean. They are all that prompts know.

import { t } from "./texts.mjs";

/** Widget values by the choice's text key; all 0 is what fits the model, which Auto begins with. */
export const PRESETS = {
    presetFit: { min_size: 0, opt_size: 0, max_size: 0, max_images: 0, max_tokens: 0 },
    presetSdxl: { min_size: 640, opt_size: 1024, max_size: 1536, max_images: 1, max_tokens: 231 },
    presetSd15: { min_size: 256, opt_size: 512, max_size: 1024, max_images: 1, max_tokens: 231 },
};
const AUTO = "presetFit", STEP = 64;
/** What some family is best at; until the model is known these are left to the server. */
const BESTS = [512, 1024];
/** Prompts come in steps of 77 tokens; three of them are usual. */
const CHUNK = 77, USUAL_TOKENS = 3 * CHUNK;
/** The numbers that nodes take, as the server's `sizes.py` has them: for others it refuses the whole prompt, native ones too. */
const MOST = { min_size: 8192, opt_size: 8192, max_size: 8192, max_images: 64, max_tokens: 4928 };
const LEAST = 16;

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

/**
 * The numbers of Auto: best at the picture that the graph asks for, and what is usual for the model's family around it.
 * 0 is what fits the model, so a graph that asks for that leaves a node as it was saved.
 * @param {{width: number, height: number, images: number}[]} latents those that reach the samplers, at least one
 * @param {Record<string, any> | undefined} fits what fits the model; until that is known the server fills the zeros
 * @param {number} tokens of the longest prompt that is known, if it is longer than usual
 */
export function autoSizes(latents, fits, tokens = 0) {
    const sides = latents.flatMap(({ width, height }) => [width, height]);
    const [least, most] = [Math.min(...sides), Math.max(...sides)], images = Math.max(...latents.map((one) => one.images));
    const [{ width, height }] = latents, middle = STEP * Math.round(Math.sqrt(width * height) / STEP);
    const best = Math.min(Math.max(middle, Math.min(width, height)), Math.max(width, height));
    return taken({
        min_size: fits && least < fits.min_size ? least : 0,
        opt_size: (fits ? [fits.opt_size] : BESTS).includes(best) ? 0 : best,
        max_size: fits && most > fits.max_size ? most : 0,
        max_images: images > (fits?.max_images ?? 1) ? images : 0,
        max_tokens: tokens > (fits?.max_tokens ?? USUAL_TOKENS) ? CHUNK * Math.ceil(tokens / CHUNK) : 0,
    });
}

/**
 * Numbers brought within those that nodes take; 0 stays.
 * @param {Record<string, number>} sizes
 */
export function taken(sizes) {
    const within = (name, size) => Math.min(Math.max(size, name.endsWith("_size") ? LEAST : 0), MOST[name]);
    return Object.fromEntries(Object.entries(sizes).map(([name, size]) => [name, size && within(name, size)]));
}

/** Whether a node can ask for a latent. */
export function askable({ width, height, images }) {
    return Math.min(width, height) >= LEAST && Math.max(width, height) <= MOST.max_size && images <= MOST.max_images;
}

/** The key of the choice whose numbers a node has, or null. */
export function presetOf(node) {
    return Object.keys(PRESETS).find((key) => sameSizes(sizesOf(node), PRESETS[key])) ?? null;
}

/** Whether two nodes have the same numbers. */
export function sameSizes(one, other) {
    return Object.keys(PRESETS[AUTO]).every((name) => one?.[name] === other?.[name]);
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
 * @returns {Record<string, number>} those that are known before the prompt runs
 */
export function numbersFromOutside(node, inputs) {
    const wired = (node.inputs ?? []).filter(({ link, widget }) => link != null && widget?.name in PRESETS[AUTO]);
    const numbers = wired.map(({ widget }) => [widget.name, inputs[widget.name]]);
    return Object.fromEntries(numbers.filter(([, number]) => Number.isFinite(number)));
}

/** A preset's name. */
export function presetName(key) {
    return key === AUTO ? t("sizesAutoFit") : t(key);
}
