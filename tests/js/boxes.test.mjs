import assert from "node:assert/strict";
import { test } from "node:test";
import { fold } from "../../js/lib/status_box.mjs";
import { isWiredLater } from "../../js/lib/graph.mjs";
import { labelRow, rowLabel, valueLabel } from "../../js/lib/labels.mjs";
import { applyPreset, offer, PRESETS } from "../../js/lib/presets.mjs";
import { keepOrder, orderWords, outOfOrder } from "../../js/lib/size_order.mjs";
import { setLanguage } from "../../js/lib/texts.mjs";
import { buttonLabel, describe } from "../../js/lib/words.mjs";

offer([{ key: "presetSdxl", family: "SDXL", sizes: { min_size: 640, opt_size: 1024, max_size: 1536, max_images: 1, max_tokens: 231 } }]);
const ENGINE = { backend: "onnxruntime", precision: "float16", profile: "64 to 512 px", bytes: 3.2e6, covers: true };
const NATIVE = { engine: 0, native: 4, backend: null, reasons: [{ reason: "shape", count: 4, text: "too large", advice: "widen" }] };

/** What a box of so many rows of 40 letters draws last; "Details" takes a row. */
function folded(lines, rows) {
    let drawn = null;
    fold(lines, (shown, rest) => {
        drawn = { shown, rest };
        return shown.reduce((sum, line) => sum + Math.ceil(line.length / 40), rest.length ? 1 : 0) <= rows;
    });
    return drawn;
}

test("a box shows the sentences that have room, whole, and nothing is lost", () => {
    assert.deepEqual(folded(["a", "b"], 4), { shown: ["a", "b"], rest: [] });
    assert.deepEqual(folded([..."abcdefg"], 7), { shown: [..."abcdefg"], rest: [] }, "a higher box shows more");
    assert.deepEqual(folded([..."abcdefg"], 4), { shown: [..."abc"], rest: [..."defg"] });
    const two = "word ".repeat(14).trim(); // rows
    assert.deepEqual(folded([two, two, "b"], 4), { shown: [two], rest: [two, "b"] }, "no sentence is cut for the sake of its start");
    const long = "word ".repeat(80).trim(), cut = folded([long, "b"], 4);
    assert.ok(cut.shown[0].length > 100 && cut.shown[0].length <= 122 && cut.shown[0].endsWith("word …"));
    assert.deepEqual(cut.rest, [long, "b"]);
    assert.deepEqual(folded([], 4), { shown: [], rest: [] });
});

test("after a build the node is green and says from when on the engine is used", () => {
    const fresh = describe({ state: "ready", engine: ENGINE, run: null });
    assert.deepEqual([fresh.tone, fresh.title, fresh.badge], ["good", "Ready for the next run", ""]);
    const used = describe({ state: "ready", engine: ENGINE, run: { engine: 4, native: 0, backend: "torch", reasons: [] } });
    assert.deepEqual([used.tone, used.title], ["good", "Ready"]);
});

test("while an engine is built nothing is said of native calls", () => {
    const job = { id: "j", state: "running", phase: "exporting", percent: 35, seconds: 70, message: "" };
    for (const state of ["asked", "queued", "building"]) assert.equal(describe({ state, job, run: NATIVE }).badge, "");
    assert.equal(describe({ state: "none", run: NATIVE }).badge, "not accelerated");
});

test("a node without a model says so on its button, unless another pack may wire it later", () => {
    assert.equal(buttonLabel("unwired"), "Connect a model to build");
    assert.equal(isWiredLater({ nodes: [{ type: "KSampler" }] }), false);
    assert.equal(isWiredLater({ nodes: [{ type: "Anything Everywhere" }] }), true);
    assert.equal(isWiredLater(null), false);
});

test("sizes have to rise, and 0 fits everywhere", () => {
    const wrong = (min_size, opt_size, max_size) => outOfOrder({ min_size, opt_size, max_size });
    assert.equal(wrong(64, 512, 512), null);
    assert.equal(wrong(0, 0, 0), null);
    assert.equal(wrong(1024, 0, 0), null);
    assert.deepEqual(wrong(512, 0, 256), ["min_size", "max_size"]);
    assert.deepEqual(wrong(512, 256, 1024), ["min_size", "opt_size"]);
    assert.deepEqual(wrong(64, 512, 256), ["opt_size", "max_size"]);
});

/** A node with the sizes' widgets, and what it was told to say. */
function sized(values) {
    const widgets = Object.entries({ ...PRESETS.presetFit, ...values }).map(([name, value]) => ({ name, value, label: name.replace("_", " ") }));
    const node = { widgets }, said = [];
    keepOrder(node, (words) => said.push(words));
    const type = (name, value) => {
        const widget = widgets.find((one) => one.name === name);
        widget.value = value;
        widget.callback(value);
        return widget.value;
    };
    return { node, said, type };
}

test("a size that is typed against the others is given its last value back, in the names that the node shows", () => {
    const { said, type, node } = sized({ min_size: 64, opt_size: 128, max_size: 512 });
    assert.equal(type("min_size", 768), 64);
    assert.equal(said.at(-1), "min size 768 is above opt size 128. min size stays 64.");
    assert.equal(type("max_size", 1024), 1024);
    assert.equal(said.at(-1), "");
    applyPreset(node, PRESETS.presetSdxl);
    assert.equal(said.at(-1), "", "a choice that sets all of them passes through nothing wrong");
});

test("wrong sizes of a workflow are told and can be mended one by one", () => {
    const { said, type, node } = sized({ min_size: 512, opt_size: 128, max_size: 256 });
    assert.equal(orderWords(node), "min size 512 is above opt size 128.");
    assert.equal(type("min_size", 200), 200);
    assert.equal(said.at(-1), "min size 200 is above opt size 128.");
    assert.equal(type("min_size", 64), 64);
    assert.equal(said.at(-1), "");
});

test("an engine that was compared with native says so, and the figure is in the tooltip", () => {
    const checked = describe({ state: "ready", engine: { ...ENGINE, rel_err: 2.3e-4 }, run: null });
    assert.equal(checked.lines[0], "64 to 512 px, same picture as without (checked)");
    assert.match(checked.hint, /differed by 0\.023 % at most/);
    const beside = describe({ state: "ready", engine: { ...ENGINE, rel_err: 1.9e-3, native_rel_err: 2.1e-3 }, run: null });
    assert.match(beside.hint, /0\.19 % from float32, the normal model by 0\.21 %/);
    const timed = (speed) => describe({ state: "ready", engine: { ...ENGINE, rel_err: 2.3e-4, speed }, run: null }).lines[0];
    assert.equal(timed(3.24), "64 to 512 px, same picture as without (checked), 3.2x as fast as without on this GPU");
    assert.equal(timed(0.8), "64 to 512 px, same picture as without (checked), slower than without on this GPU (0.8x)");
    const refitted = (refit_s) => describe({ state: "ready", engine: { ...ENGINE, rel_err: 2.3e-4, refit_s }, run: null }).lines[0];
    assert.equal(refitted(29.6), "64 to 512 px, same picture as without (checked), new weights (LoRA, checkpoint) take up to 29 s");
    assert.equal(refitted(0.9), "64 to 512 px, same picture as without (checked)", "nobody waits for that");
    assert.ok(checked.lines.every((line) => !line.includes("0.023 %")));
    assert.deepEqual(describe({ state: "ready", engine: ENGINE, run: null }).lines, ["64 to 512 px", "onnxruntime, float16, 3.2 MB"]);
});

test("combos' values and rows are read as people say them, in the page's language", () => {
    assert.deepEqual([valueLabel("build now"), valueLabel("torch"), rowLabel("rows.strength_2"), rowLabel("rows"), rowLabel()],
        ["build first", "torch", "strength_2", null, null]);
    const any = (comfyClass) => valueLabel("replaceable", { comfyClass });
    assert.deepEqual([any("TRTUNetEngine"), any("TRTControlNetEngine")], ["any checkpoint and LoRA", "any ControlNet of this kind"]);
    setLanguage("zh");
    assert.deepEqual([valueLabel("build now"), valueLabel("torch"), rowLabel("rows.strength_12"), rowLabel("rows.control_net_1")],
        ["先构建", "torch", "强度 12", "ControlNet 1"]);
    const named = (label) => { const input = { name: "rows.image_1", label }; labelRow(input); return input.label; };
    assert.deepEqual([named("image_1"), named("my picture"), named(undefined)], ["图像 1", "my picture", "图像 1"]);
    setLanguage("en");
    assert.equal(named("图像 1"), "image_1");
});
