// "Accelerate this workflow" and "Remove acceleration": the server changes the workflow, the page loads it in place.

import { request } from "./server.mjs";

/**
 * Have the server change the open workflow; the change is one step of undo.
 * @param {any} app
 * @param {any} api
 * @param {"add" | "remove"} what
 * @param {number} tries again where the graph changes meanwhile; the last takes one that is never the same
 * @returns {Promise<{ count: number, left: string } | null>} how many nodes were added or taken out, and what was left as it
 *   was; null where another workflow was opened meanwhile
 */
export async function changeAcceleration(app, api, what, tries = 3) {
    const serialised = () => JSON.parse(JSON.stringify((app.rootGraph ?? app.graph).serialize()));
    const open = () => app.extensionManager.workflow.activeWorkflow, wanted = open(), before = serialised();
    const { workflow, count, left } = await request(api, "/accelerate", { method: "POST", json: { workflow: before, what } });
    if (!count) return { count, left };
    if (open() !== wanted) return null;
    if (tries > 1 && JSON.stringify(serialised()) !== JSON.stringify(before)) return changeAcceleration(app, api, what, tries - 1);
    const { changeTracker: changes } = wanted;
    (changes.captureCanvasState ?? changes.checkState).call(changes);
    changes.redoQueue.length = 0;
    await changes.updateState([workflow], changes.undoQueue);
    changes.activeState = serialised(); // what the page adds to nodes as it loads them is no change of the user's
    return { count, left };
}
