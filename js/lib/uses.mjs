// A node may want several engines: TRT Accelerate has one for each network, and a node in a subgraph that is used twice is there
// twice. What these uses show together, the worst first.

import { isMissing } from "./workflow.mjs";

/** @typedef {import("./workflow.mjs").State & {others?: State[]}} State of a node's worst use, with those of the others */

/** What is under way comes first, for it can be cancelled; then what a build would mend. */
const FIRST = ["building", "queued", "asked", "failed", "broken", "stale", "unchecked", "none", "unknown"];

/** The states of all uses of a node that want different engines. */
export function usesOf({ others = [], ...state }) {
    return [state, ...others];
}

/** The state that a node shows, of those of its uses. */
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

/** The uses that a press of the button builds for: those that lack something, or else all. */
export function wantedUses(state) {
    const uses = usesOf(state), lacking = uses.filter((use) => isMissing(use) || use.misfit);
    return lacking.length ? lacking : uses;
}

function rank(use) {
    if (FIRST.includes(use.state)) return FIRST.indexOf(use.state) + (use.misfit ? 0 : 0.5);
    const after = isMissing(use) ? 0 : use.state !== "ready" ? 1 : use.misfit || use.run?.native || use.job?.state === "failed" ? 2 : 3;
    return FIRST.length + after;
}
