import assert from "node:assert/strict";
import { test } from "node:test";
import { inSight, MARK, openReadable, readableView } from "../../js/lib/template_view.mjs";

const BOXES = [[100, 50, 300, 100], [0, 80, 50, 50]];

test("a template that the page shrank too far to draw its text starts at its top left, larger", () => {
    const { scale, offset } = readableView(0.45, BOXES);
    const screen = [[0, 50], [100, 50]].map(([x, y]) => [(x + offset[0]) * scale, (y + offset[1]) * scale].map(Math.round));
    assert.deepEqual([scale, screen], [0.6, [[80, 112], [140, 112]]]);
});

test("a view that can be read stays, and nothing to see is no view", () => {
    assert.deepEqual([readableView(0.7, BOXES), readableView(0.2, [])], [null, null]);
});

test("only the pack's own templates are touched, and only when they are opened from the dialog", async () => {
    const node = { getBounding: () => [0, 0, 4000, 100] }, dirty = [];
    const app = { rootGraph: { extra: { [MARK]: true } }, canvas: { graph: { nodes: [node] }, ds: { scale: 0.2, offset: [1, 2] }, setDirty: () => dirty.push(1) } };
    openReadable(app);
    assert.deepEqual(app.rootGraph.extra, {}, "what the user saves is a workflow like any other");
    await new Promise((done) => setTimeout(done, 250));
    assert.deepEqual([app.canvas.ds.scale, dirty.length], [0.6, 1]);
    app.canvas.ds.scale = 0.2;
    openReadable(app);
    openReadable({});
    await new Promise((done) => setTimeout(done, 250));
    assert.equal(app.canvas.ds.scale, 0.2);
});

test("a node is in sight when it can be read: in the open graph, in the window, not too small", () => {
    globalThis.document = { hidden: false };
    const graph = {}, canvas = { graph, ds: { scale: 1, visible_area: [100, 100, 800, 600] } };
    const node = { graph, pos: [200, 200], size: [300, 200] };
    assert.equal(inSight(canvas, node), true);
    assert.equal(inSight(canvas, { ...node, pos: [-200, 200] }), false, "its middle is left of the window");
    assert.equal(inSight(canvas, { ...node, pos: [200, 650] }), false);
    assert.equal(inSight(canvas, { ...node, graph: {} }), false, "in a subgraph");
    assert.equal(inSight({ ...canvas, ds: { ...canvas.ds, scale: 0.3 } }, node), false, "too small to read");
    globalThis.document.hidden = true;
    assert.equal(inSight(canvas, node), false, "another tab is in front");
    delete globalThis.document;
});
