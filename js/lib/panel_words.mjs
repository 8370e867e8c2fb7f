// What the engines panel lists, as pure functions.

import { said } from "./server_zh.mjs";
import { t } from "./texts.mjs";
import { duration, elapsed, errorOf, marked, shortName, size } from "./words.mjs";

/** @typedef {{label: string, engines: any[], bytes: number}} Group the engines of one model */

const ENDED_SHOWN = 3;
export const LIVE = ["running", "queued"];

const byName = (a, b) => (a.label ?? a.name).localeCompare(b.label ?? b.name, undefined, { numeric: true }) || a.name.localeCompare(b.name);
const latest = (key) => (a, b) => moment(b[key]) - moment(a[key]) || byName(a, b);
/** Ways to sort, by the keys of their names. */
const SORTS = { sortName: byName, sortDate: latest("created"), sortSize: (a, b) => b.bytes - a.bytes || byName(a, b), sortUsed: latest("last_used") };
export const SORT_KEYS = Object.keys(SORTS);

/** The engines that a filter's words all appear in, whatever their case. */
export function matching(engines, filter) {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    return engines.filter((engine) => {
        const text = [...Object.values(engine), t(engine.state)].join(" ").toLowerCase();
        return words.every((word) => text.includes(word));
    });
}

/**
 * The engines model by model. The first model is that of the first engine in the order; damaged engines of no known model
 * come last.
 * @param {any[]} engines
 * @param {string} order one of SORT_KEYS
 * @returns {Group[]}
 */
export function grouped(engines, order) {
    const groups = new Map();
    for (const engine of [...engines].sort(SORTS[order] ?? byName)) {
        const label = engine.label ?? "";
        if (!groups.has(label)) groups.set(label, { label: label || t("damagedGroup"), engines: [], bytes: 0 });
        groups.get(label).engines.push(engine);
        groups.get(label).bytes += engine.bytes;
    }
    return [...groups].sort(([a], [b]) => Number(!a) - Number(!b)).map(([, group]) => group);
}

/**
 * An engine's row: two lines, and details for who asks for more.
 * @param {string} [order] how the list is sorted: what it goes by is shown
 * @returns {{title: string, meta: string, details: string[]}}
 */
export function engineRow(engine, order = "") {
    const state = marked(engine.state), any = engine.any_weights && t("anyWeights");
    const facts = [profileOf(engine), engine.backend, engine.precision, any];
    if (engine.state === "broken")
        return { title: said(engine.profile ?? engine.name), meta: `${marked("broken", t("damagedRow"))} · ${size(engine.bytes)}`,
            details: [t("damagedDetails"), engine.reason, engine.name] };
    const when = order === "sortDate" ? t("builtOn", { date: date(engine.created, { dateStyle: "short" }) }) : used(engine, "usedOn");
    return {
        title: facts.filter(Boolean).join(", "), meta: [state, size(engine.bytes), when].join(" · "),
        details: [
            [t(engine.kind), ...facts].filter(Boolean).join(", "), `${state} · ${size(engine.bytes)}`, ...(engine.reason ? [said(engine.reason)] : []),
            t("error", { error: errorOf(engine) }), t("builtIn", { date: date(engine.created), time: duration(engine.seconds) }),
            used(engine, "lastUsed"), engine.name],
    };
}

/** What an engine is for: first what only it has among its model's engines, since long lines are cut. */
const profileOf = ({ changes, profile }) => [changes, profile].filter(Boolean).map(said).join(", ");

/** When an engine served last: the day in a row, the minute where there is room. */
function used({ last_used: last }, key) {
    const style = { dateStyle: "short", ...(key === "usedOn" ? {} : { timeStyle: "short" }) };
    return last ? t(key, { date: date(last, style) }) : t("neverUsed");
}

/** The jobs worth showing: what runs, what waits in its order, then the latest that are over. */
export function shownJobs(jobs) {
    const alive = jobs.filter((job) => LIVE.includes(job.state));
    const ended = jobs.filter((job) => !alive.includes(job)).slice(-ENDED_SHOWN).reverse();
    return [...alive.sort((a, b) => Number(b.state === "running") - Number(a.state === "running")), ...ended];
}

/** Whether there are jobs to clear away. */
export function anyEnded(jobs) {
    return jobs.some((job) => !LIVE.includes(job.state));
}

/** A list of jobs after one of them has changed, and whether that means more than progress. */
export function withJob(jobs, job) {
    const before = jobs.find(({ id }) => id === job.id);
    const list = before ? jobs.map((other) => (other === before ? job : other)) : [...jobs, job];
    return { jobs: list, ended: !LIVE.includes(job.state) };
}

/** A job as [headline, what it does or why it failed]. `before` is how many builds are ahead of one that waits. */
export function jobLines(job, before = 0) {
    const head = `${shortName(job.label)} · ${marked(job.state, t(job.state === "cancelled" ? "stateCancelled" : job.state))}`;
    const line = (words) => said([words, job.wanted].filter(Boolean).join(" · "));
    if (job.state === "running") return [`${head} ${job.percent} %`, line(`${job.phase}, ${elapsed(job)}`)];
    if (job.state === "queued") return [head, line(before ? t("buildsBefore", { count: before }) : "")];
    return job.state === "failed" && job.message ? [head, said(job.message)] : [head];
}

/** A question before engines are deleted: what is asked, what it means, and the button that does it. */
export function deleteQuestion(engines) {
    const bytes = size(engines.reduce((sum, engine) => sum + engine.bytes, 0));
    const [first] = engines, many = engines.length > 1;
    return {
        title: t(many ? "deleteMany" : "deleteOne", { count: engines.length }),
        text: many ? t("deleteManyText", { count: engines.length, size: bytes })
            : t(first.state === "broken" ? "deleteDamagedText" : "deleteOneText", { name: first.label ?? first.name, profile: profileOf(first), size: bytes }),
        yes: t("delete"), danger: true,
    };
}

function moment(text) {
    const parsed = new Date(text ?? 0).getTime();
    return Number.isNaN(parsed) ? 0 : parsed;
}

function date(text, style = { dateStyle: "short", timeStyle: "short" }) {
    const parsed = new Date(text);
    return Number.isNaN(parsed.getTime()) ? "?" : parsed.toLocaleString([], style);
}
