// What the engines panel lists, as pure functions.

import { t } from "./texts.mjs";
import { duration, elapsed, error, size } from "./words.mjs";

const TONES = { ready: "good", stale: "warn", unchecked: "warn", broken: "bad", running: "busy", queued: "busy", done: "good", failed: "bad" };
const JOBS = { running: "running", queued: "queued", done: "done", failed: "failed", cancelled: "stateCancelled" };
const ENDED_SHOWN = 3;

/** The colour of an engine or a job in a state. */
export function tone(state) {
    return TONES[state] ?? "idle";
}

/** The engines that a filter's words all appear in, whatever their case. */
export function matching(engines, filter) {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    return engines.filter((engine) => {
        const text = Object.values(engine).join(" ").toLowerCase();
        return words.every((word) => text.includes(word));
    });
}

/** An engine as [headline, what it is, when and how good]. */
export function engineLines(engine) {
    const state = t(engine.state);
    if (!engine.label) return [`${engine.name} · ${state}`, `${size(engine.bytes)}. ${engine.reason}`];
    const what = [t(engine.kind), engine.backend, engine.precision, engine.profile].join(", ");
    const made = [size(engine.bytes), date(engine.created), duration(engine.seconds), t("error", { error: error(engine.rel_err) })].join(" · ");
    return [`${engine.label} · ${state}`, what, made, used(engine), ...(engine.reason ? [engine.reason] : [])];
}

/** When an engine served last. */
function used({ last_used: last }) {
    return last ? t("lastUsed", { date: date(last) }) : t("neverUsed");
}

/**
 * The engines that served nothing for some days; those that never did count from their build or their arrival.
 * @param {any[]} engines
 * @param {number} now milliseconds
 */
export function unused(engines, days, now) {
    const old = ({ unused_since: since }) => Boolean(since) && now - new Date(since).getTime() > days * 86400e3;
    return engines.filter((engine) => !engine.read_only && old(engine));
}

/** The jobs worth showing: all that are not over, then the latest that are. */
export function shownJobs(jobs) {
    const alive = jobs.filter((job) => ["running", "queued"].includes(job.state));
    const ended = jobs.filter((job) => !alive.includes(job)).slice(-ENDED_SHOWN).reverse();
    return [...alive.sort((a, b) => Number(b.state === "running") - Number(a.state === "running")), ...ended];
}

/** A job as [headline, what it does or how it ended]. */
export function jobLines(job) {
    const head = `${job.label} · ${t(JOBS[job.state] ?? job.state)}`;
    if (job.state === "running") return [`${head} ${job.percent} %`, `${job.phase}, ${elapsed(job)}`, job.wanted];
    return [head, job.message || job.wanted];
}

function date(text) {
    const parsed = new Date(text);
    return Number.isNaN(parsed.getTime()) ? "?" : parsed.toLocaleString([], { dateStyle: "short", timeStyle: "short" });
}
