// Values of combos, and the rows of TRT Apply ControlNet, as people read them. What is saved and sent stays as it is.

import { CONTROLNET_ENGINE } from "./node_names.mjs";
import { everywhere, t } from "./texts.mjs";

const VALUES = {
    "use native": "useNative", "build now": "buildNow", "build in background": "buildBackground", auto: "auto",
    "built in": "weightsFixed", replaceable: "weightsAny", one: "oneGpu", all: "allGpus",
};
/** A ControlNet has no LoRAs. */
const OF_CONTROLNET = { replaceable: "weightsAnyControl" };
const ROW = /^rows\.(control_net|image|strength|start|end)_(\d+)$/;

/** A combo's value as people read it. */
export function valueLabel(value, node = {}) {
    const values = node.comfyClass === CONTROLNET_ENGINE ? { ...VALUES, ...OF_CONTROLNET } : VALUES;
    return value in values ? t(values[value]) : value;
}

/** Show a node's combos in words. */
export function labelValues(node) {
    const label = (value) => valueLabel(value, node);
    for (const { type, options } of node.widgets ?? [])
        if (type === "combo" && options.values?.some?.((value) => label(value) !== value)) options.getOptionLabel = label;
}

/** Name a row's input or widget in the page's language; what the user called it stays. */
export function labelRow(part) {
    const [, what, number] = ROW.exec(part?.name ?? "") ?? [];
    if (!what || (part.label && !everywhere(`row_${what}`, { number }).includes(part.label))) return;
    part.label = rowLabel(part.name);
}

/**
 * What a row's input or widget is called, or null for one that is in no row.
 * @param {string} name for example "rows.strength_2"
 */
export function rowLabel(name) {
    const [, what, number] = ROW.exec(name ?? "") ?? [];
    return what ? t(`row_${what}`, { number }) : null;
}
