// What becomes of the picture when an engine node is switched off: that depends on the nodes behind it.

import { BYPASSED, MUTED } from "./look.mjs";
import { t } from "./texts.mjs";

/**
 * What a muted or bypassed engine node says; amber where more is lost than speed.
 * @param {any} node
 * @returns {{text: string, tone: string}}
 */
export function switchedOff(node) {
    if (![MUTED, BYPASSED].includes(node.mode)) return { text: t("offInside"), tone: "idle" };
    const muted = { TRTControlNetEngine: "offMuted", TRTAccelerate: "offRefused", TRTVAEEngine: "offRefused" }[node.comfyClass];
    if (muted && node.mode === MUTED) return { text: t(muted), tone: "warn" };
    return { text: t("offHint"), tone: "idle" };
}
