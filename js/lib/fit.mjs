// Will the picture that the graph asks for fit a node's engine? Told before a run, and only when it is certain.

import { ENGINE_NODES, isLink } from "./graph.mjs";
import { meant, taken } from "./presets.mjs";

/** @typedef {{width: number, height: number, images: number}} Latent */
/** @typedef {{min: number, max: number, images: number}} Limits sizes in pixels, images per batch */

const isSampler = (node) => isLink(node.inputs.latent_image);

/**
 * The latents that an engine node's network will be called with, as far as the prompt tells.
 * @param {Record<string, {class_type: string, inputs: Record<string, any>}>} prompt the whole graph's API prompt
 * @param {string} id the engine node's id in it
 * @returns {(Latent & {cfg: number | undefined})[]} one for each sampler whose latent is an empty one of plain numbers
 */
export function latentsFor(prompt, id) {
    return samplersFor(prompt, id).flatMap(({ inputs }) => {
        const empty = prompt[inputs.latent_image[0]];
        const { width, height, batch_size: images = 1 } = empty?.inputs ?? {};
        const certain = /empty.*latent/i.test(empty?.class_type ?? "") && [width, height, images].every(Number.isFinite);
        return certain ? [{ width, height, images, cfg: inputs.cfg }] : [];
    });
}

/** The ids of the engine nodes of a prompt that serve a sampler which one of them serves, itself included. */
export function sameSampler(prompt, id) {
    const mine = new Set(samplersFor(prompt, id));
    return Object.keys(prompt).filter((other) => other === id
        || (ENGINE_NODES.includes(prompt[other].class_type) && samplersFor(prompt, other).some((sampler) => mine.has(sampler))));
}

/** The samplers of a prompt that call an engine node's network. */
function samplersFor(prompt, id) {
    const readers = new Map();
    for (const [reader, node] of Object.entries(prompt))
        for (const value of Object.values(node.inputs))
            if (isLink(value)) readers.set(String(value[0]), [...(readers.get(String(value[0])) ?? []), reader]);
    const found = [], seen = new Set(), queue = [id];
    while (queue.length) {
        const current = queue.pop();
        if (seen.has(current) || !prompt[current]) continue;
        seen.add(current);
        const node = prompt[current];
        // what a sampler makes goes on to others, which may use other models
        if (!isSampler(node)) queue.push(...(readers.get(current) ?? []));
        else found.push(node);
    }
    return found;
}

/**
 * The first latent that does not fit, or null.
 * @param {(Latent & {cfg?: number})[]} latents
 * @param {Limits} limits
 */
export function misfit(latents, limits) {
    return latents.find(({ width, height, images, cfg }) => {
        // an engine takes twice the images, for the two prompts of CFG; without it that many images fit
        const room = Number.isFinite(cfg) && cfg !== 1 ? limits.images : 2 * limits.images;
        return Math.min(width, height) < limits.min || Math.max(width, height) > limits.max || images > room;
    }) ?? null;
}

/**
 * What a node's engine takes: the one that is there, or the one that its settings ask for; null when any size runs.
 * @param {any} state the server's answer for the node
 * @param {Record<string, any>} inputs the node's inputs in the prompt
 * @returns {Limits | null}
 */
export function limitsOf(state, inputs) {
    const engine = state.state === "ready" ? state.engine : null;
    // live weights run every size, those without a compiled file uncompiled
    if (state.any_size || (engine?.backend ?? inputs.backend) === "torch") return null;
    if (engine) return engine.limits ?? null;
    const sizes = meant(inputs, state.fits);
    return sizes && { min: sizes.min_size, max: sizes.max_size, images: sizes.max_images };
}

/**
 * The latent that an engine node's engine will not serve, or null.
 * @param {Record<string, any>} prompt
 * @param {string} id
 * @param {any} state
 */
export function misfitOf(prompt, id, state) {
    const node = prompt[id];
    const limits = node && ENGINE_NODES.includes(node.class_type) ? limitsOf(state, node.inputs) : null;
    return limits && misfit(latentsFor(prompt, id), limits);
}

/** The batches of the calls that sample a latent, the usual one first: with CFG, a call has both prompts. */
function batchesOf({ images, cfg }) {
    if (!Number.isFinite(cfg)) return [2 * images, images];
    return [cfg === 1 ? images : 2 * images];
}

/**
 * The latent that a node's engine has no compiled file for, where it has one for each picture, or null.
 * @param {Record<string, any>} prompt
 * @param {string} id
 * @param {any} state
 */
export function uncompiledOf(prompt, id, state) {
    const compiled = state.state === "ready" ? state.engine?.compiled : null;
    if (!compiled) return null;
    const there = (latent) => compiled.some(({ width, height, batch }) =>
        width === rounded(latent.width) && height === rounded(latent.height) && batchesOf(latent).includes(batch));
    return latentsFor(prompt, id).find((latent) => !there(latent)) ?? null;
}

/** A latent has an element for every 8 pixels. */
const rounded = (pixels) => 8 * Math.floor(pixels / 8);

/**
 * The widget values that a node needs so that a latent fits: wider ones, never narrower. What fits already stays, so 0,
 * which is what fits the model, too.
 * @param {Latent} latent
 * @param {Record<string, number>} now the widgets' values by name
 * @param {Record<string, any>} [fits] what fits the model
 */
export function widened({ width, height, images }, now, fits) {
    const sizes = meant(now, fits) ?? now;
    const [least, most] = [Math.min(width, height), Math.max(width, height)];
    return taken({
        min_size: least < sizes.min_size ? least : now.min_size,
        max_size: most > sizes.max_size ? most : now.max_size,
        max_images: images > sizes.max_images ? images : now.max_images,
    });
}
