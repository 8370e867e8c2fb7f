import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { inChinese, NOTES, titlesInChinese } from "../../js/lib/notes_zh.mjs";
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
    openReadable(app, () => assert.fail("a user's own note"));
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

test("every template's note is there in Chinese, names the same nodes, and is put in when the template opens", () => {
    const folder = new URL("../../workflows/", import.meta.url), seen = [];
    for (const file of readdirSync(folder).filter((name) => name.endsWith(".json"))) {
        const { nodes } = JSON.parse(readFileSync(new URL(file, folder), "utf8"));
        for (const { widgets_values: [note] } of nodes.filter(({ type }) => type === "MarkdownNote")) {
            const chinese = inChinese(note), names = (text) => new Set(text.match(/\*[A-Z][A-Za-z0-9 ()]+\*/g));
            assert.match(chinese, /^# [^\n]*[\u4e00-\u9fff]/, file);
            for (const name of names(chinese)) assert.ok(note.includes(name.replaceAll("*", "")), `${file}: ${name}`);
            seen.push(note.split("\n", 1)[0]);
        }
    }
    assert.deepEqual(new Set(seen), new Set(Object.keys(NOTES)));
    const note = { type: "MarkdownNote", widgets: [{ value: `${seen[0]}\n\nmore` }], getBounding: () => [0, 0, 1, 1] };
    const app = { rootGraph: { extra: { [MARK]: true } }, canvas: { graph: { nodes: [note] }, ds: { scale: 1 } } };
    openReadable(app, inChinese);
    assert.equal(note.widgets[0].value, NOTES[seen[0]]);
    assert.equal(titlesInChinese("Control image 1 (edges)"), "控制图像 1（边缘）");
    assert.equal(titlesInChinese("**1 Models**\n*TRT ControlNet Engine 1*, Prompt"), "**1 模型**\n*TRT ControlNet 引擎 1*, Prompt", "what a note marks");
    assert.equal(inChinese("my own note"), "my own note");
});
