// At the first build, once: an offer to limit the disk space of all engines. It waits in a corner and holds up nothing.

import { askNumber } from "./dialog.mjs";
import { request } from "./server.mjs";
import { LIMIT_OFFERED } from "./settings.mjs";
import { t } from "./texts.mjs";
import { size } from "./words.mjs";

let offered = false; // on this page: a build tells of itself many times

/** Half of what is free, and what the engines have already, in steps of 5 GB. */
export function sensibleLimit(bytes, free) {
    return Math.max(5, 5 * Math.floor((bytes + free / 2) / 5e9));
}

/**
 * Offer a limit, unless there is one or it was offered before.
 * @param {any} api ComfyUI's api
 * @param {{get: (id: string) => unknown, set: (id: string, value: unknown) => Promise<void>}} setting the user's settings
 * @param {(severity: string, summary: string, detail: string) => void} toast
 */
export async function offerLimit(api, setting, toast) {
    if (offered || setting.get(LIMIT_OFFERED)) return;
    offered = true;
    const [{ limit_gb }, { bytes, free }] = await Promise.all([request(api, "/settings"), request(api, "/engines")]);
    await setting.set(LIMIT_OFFERED, true);
    if (limit_gb > 0 || !(free >= 0)) return;
    const words = { free: size(free), used: size(bytes) };
    const limit = await askNumber(t("offerLimit"), t("offerLimitText", words), sensibleLimit(bytes, free), t("offerSet"), t("offerNone"));
    if (limit === null) return;
    try {
        await request(api, "/settings", { method: "POST", json: { limit_gb: limit } });
        toast("success", t("offerLimit"), t("offerKept", { limit }));
    } catch (failure) {
        toast("error", t("failedAction"), failure.message);
    }
}
