// What the engines of a node's uses, and of a whole workflow, need: pure functions from states to counts, shares and seconds.
//
// A node may want several engines: TRT Accelerate has one for each network, and a node in a subgraph that is used twice is
// there twice. What these uses show together, the worst first.

import { BUSY, isThere, lacksSizes } from "./words.mjs";

/** @typedef {{state: string, build_helps?: boolean, key?: string, engine?: any, job?: any, outlook?: any}} State the server's answer for a node */
/** @typedef {{ready: number, missing: number, busy: number, total: number, unable: number, building: number, unsure: number, seconds: number | null}} Needs */

/** Whether a build would give a node an engine, or one for all its sizes. */
export function isMissing(node) {
    return (node.build_helps === true && !BUSY.includes(node.state)) || lacksSizes(node);
}

/**
 * What engine nodes lack. Nodes that want the same engine count once; nodes that are off or unwired do not count, and nodes
 * that can have no engine (`unable`) are in no total. Some of the missing may be there: only a run tells (`unsure`).
 * @param {State[]} states
 * @returns {Needs} with the seconds until all are built; null when they are not known of each
 */
export function needs(states) {
    const known = distinct(states);
    const busy = known.filter(({ state }) => BUSY.includes(state)), missing = known.filter((state) => isMissing(state) && !isThere(state));
    const ready = known.filter((state) => isThere(state) || (state.state === "ready" && !isMissing(state)));
    const count = (wanted) => known.filter(({ state }) => state === wanted).length;
    const waits = [...busy, ...missing].map(left);
    return {
        ready: ready.length, missing: missing.length, busy: busy.length, total: ready.length + missing.length + busy.length,
        unable: count("unavailable"), building: count("building"), unsure: missing.filter(({ state, there }) => state === "unknown" && there !== false).length,
        seconds: waits.includes(null) ? null : waits.reduce((sum, wait) => sum + wait, 0),
    };
}

/**
 * How much of some builds is done, by the seconds that each takes, or by their number where that is not known.
 * @param {State[]} states of the nodes that wait for them; a node that waits no more is done
 * @param {Map<string, number>} weights node key -> seconds, kept from look to look
 */
export function progress(states, weights) {
    let done = 0, all = 0;
    for (const { key, state, job, outlook } of distinct(states)) {
        const known = job?.expected ?? outlook?.seconds;
        if (known > 0 || !weights.has(key)) weights.set(key, known > 0 ? known : 1);
        all += weights.get(key);
        done += weights.get(key) * (BUSY.includes(state) ? (job?.percent ?? 0) / 100 : 1);
    }
    return all ? done / all : 0;
}

function distinct(states) {
    return [...new Map(states.map((state, i) => [state.key || i, state])).values()];
}

/** Seconds until a node has its engine, or null. */
function left({ job, outlook }) {
    if (job?.expected > 0 && job.percent < 100) return Math.max(0, job.expected - (job.seconds ?? 0));
    return outlook?.seconds ?? null;
}

/** @typedef {State & {others?: State[]}} NodeState of a node's worst use, with the states of its other uses */

/** What is under way comes first, for it can be cancelled; then what a build would mend. */
const FIRST = ["building", "queued", "asked", "failed", "broken", "stale", "unchecked", "none", "unknown"];

/** The states of all uses of a node that want different engines. */
export function usesOf({ others = [], ...state }) {
    return [state, ...others];
}

/** The state that a node shows, from the states of its uses. */
export function together(uses) {
    const sorted = [...uses].sort((a, b) => rank(a) - rank(b));
    const [worst, ...others] = sorted.filter((use, i) => sorted.findIndex(({ key }) => key === use.key) === i);
    return others.length ? { ...worst, others } : worst;
}

/** Whether two uses are of the same network at the same place. */
export function isSame(one, other) {
    return one.id === other.id && one.input === other.input;
}

/** A node's state after each use's has changed. */
export function changedUses(state, change) {
    return together(usesOf(state).map(change));
}

/** The uses that a press of the button builds for: uses that lack something, or else all. */
export function wantedUses(state) {
    const uses = usesOf(state), lacking = uses.filter((use) => isMissing(use) || use.misfit);
    return lacking.length ? lacking : uses;
}

function rank(use) {
    if (FIRST.includes(use.state)) return FIRST.indexOf(use.state) + (use.misfit ? 0 : 0.5);
    const after = isMissing(use) ? 0 : use.state !== "ready" ? 1 : use.misfit || use.run?.native || use.job?.state === "failed" ? 2 : 3;
    return FIRST.length + after;
}
