import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as wait } from "node:timers/promises";
import { Tracker } from "../../js/lib/tracker.mjs";

const SOON = 400;

/** A tracker on one engine node with a model, which counts its looks at the graph and its questions. */
function tracked() {
    const count = { looks: 0, questions: 0 };
    const links = new Map([[0, { origin_id: 1, origin_slot: 0 }]]);
    const graph = { getLink: (id) => links.get(id), getNodeById: () => loader };
    const loader = { id: 1, comfyClass: "Loader", inputs: [], graph };
    const node = { id: 2, comfyClass: "TRTUNetEngine", inputs: [{ name: "model", type: "MODEL", link: 0 }], graph };
    const root = { get nodes() { count.looks += 0.5; return [loader, node]; } }; // once for engine nodes, once for the prompt
    const api = { fetchApi: async () => {
        count.questions += 1;
        return { ok: true, json: async () => ({ nodes: { 2: { state: "none", key: "k" } } }) };
    } };
    const tracker = new Tracker({ rootGraph: root }, api);
    const shown = [];
    tracker.views.set(node, { node, key: "", state: {}, show(state) { this.key = state.key; shown.push(state.state); } });
    return { tracker, count, shown };
}

test("the graph is looked at when it may have changed, however often that is said, and the server is asked otherwise", async () => {
    const { tracker, count, shown } = tracked();
    for (let i = 0; i < 50; i++) tracker.changed();
    await wait(SOON);
    assert.deepEqual([count, shown], [{ looks: 1, questions: 1 }, ["none"]]);
    for (let i = 0; i < 50; i++) tracker.soon();
    await wait(SOON);
    assert.deepEqual(count, { looks: 1, questions: 2 });
});

test("nodes of a workflow that was left do not count as those of the open one", async () => {
    const { tracker } = tracked(), [open] = tracker.views.values();
    const left = { node: { id: 9, comfyClass: "TRTUNetEngine", graph: {} }, key: "", state: {}, show() {} };
    tracker.views.set(left.node, left);
    assert.deepEqual(tracker.present, []);
    await tracker.refresh();
    assert.deepEqual([tracker.views.size, tracker.present], [2, [open]]);
});

test("a page that nobody sees does nothing, and catches up when it is seen", async () => {
    const { tracker, count } = tracked();
    globalThis.document = { hidden: true };
    tracker.changed();
    await wait(SOON);
    assert.deepEqual(count, { looks: 0, questions: 0 });
    globalThis.document = { hidden: false };
    tracker.shown();
    await wait(SOON);
    assert.deepEqual(count, { looks: 1, questions: 1 });
    tracker.shown();
    await wait(SOON);
    assert.deepEqual(count, { looks: 1, questions: 1 });
    delete globalThis.document;
});

test("the progress of a build for nobody here asks once, its end once more", async () => {
    const { tracker, count } = tracked();
    await tracker.refresh();
    for (let percent = 0; percent < 5; percent++) {
        tracker.hear({ id: "j", keys: ["other"], state: "running", percent });
        await wait(SOON);
    }
    assert.equal(count.questions, 2);
    tracker.hear({ id: "j", keys: ["other"], state: "done" });
    await wait(SOON);
    assert.deepEqual(count, { looks: 1, questions: 3 });
});
