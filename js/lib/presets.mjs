// Profiles under names that people understand, for the engine nodes' menu.

import { t } from "./texts.mjs";

/** Widget values by the preset's text key. */
export const PRESETS = {
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
