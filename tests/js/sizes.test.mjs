import assert from "node:assert/strict";
import { test } from "node:test";
import { PictureSizes } from "../../js/lib/picture_sizes.mjs";
import { applyPreset, offer, presetName, PRESETS, sizesOf } from "../../js/lib/presets.mjs";

offer([ // as the server does
    { key: "presetSdxl", family: "SDXL", sizes: { min_size: 640, opt_size: 1024, max_size: 1536, max_images: 1, max_tokens: 231 } },
    { key: "presetSd15", family: "SD 1.5", sizes: { min_size: 256, opt_size: 512, max_size: 1024, max_images: 1, max_tokens: 231 } },
]);
const ZEROS = PRESETS.presetFit;
const AUTO_PORTRAIT = { ...ZEROS, opt_size: 768 }, AUTO_SQUARE = { ...ZEROS, opt_size: 512 };
const SDXL = { family: "SDXL", min_size: 512, opt_size: 1024, max_size: 1536, max_images: 1, max_tokens: 231 };
/** What the server tells of a model's sizes, before and after it knows the graph's picture. */
const nothing = () => ({ fits: SDXL, asked: SDXL, auto: null, pictures: [] });
const of = (width, height, auto) => ({ fits: SDXL, asked: SDXL, auto, pictures: [{ width, height, images: 1 }] });
const portrait = (more = {}) => of(640, 960, { ...AUTO_PORTRAIT, ...more }), square = () => of(512, 512, AUTO_SQUARE);

/** A node with the five numbers, as ComfyUI makes and saves it. */
function engineNode(values = {}, properties = {}, followed = new Map()) {
    const widgets = [{ name: "when_missing", value: "use native" },
        ...Object.entries({ ...ZEROS, ...values }).map(([name, value]) => ({ name, value, options: { advanced: true } }))];
    const node = { id: 3, graph: { id: "g" }, widgets, properties, addWidget(type, name, value, callback, options) {
        const widget = { type, name, value, callback, options };
        widgets.push(widget);
        return widget;
    }, getLayoutWidgets: () => [...widgets], toggleAdvanced() { node.showAdvanced = !node.showAdvanced; } };
    const count = { changed: 0, toAll: 0 };
    const sizes = new PictureSizes(node, () => { count.changed += 1; }, () => { count.toAll += 1; }, followed);
    const preset = widgets.find(({ name }) => name === "size_preset");
    return { node, sizes, preset, count, pick: (start) => preset.callback(preset.options.values.find((value) => value.startsWith(start))),
        type(name, value) {
            const widget = widgets.find((one) => one.name === name);
            widget.value = value;
            widget.callback(value);
        } };
}

test("the choices rise from min to max, have names, and set the widgets that there are", () => {
    for (const [key, values] of Object.entries(PRESETS)) {
        assert.ok(values.min_size <= values.opt_size && values.opt_size <= values.max_size, key);
        assert.match(presetName(key), key === "presetFit" ? /^Auto/ : /^SD(XL| 1\.5), all usual formats$/);
        assert.equal(values.max_tokens % 77, 0);
    }
    const heard = [], node = { widgets: [{ name: "max_size", value: 1, callback: (v) => heard.push(v) }, { name: "backend", value: "auto" }] };
    applyPreset(node, PRESETS.presetSdxl);
    assert.deepEqual([node.widgets.map((w) => w.value), heard], [[1536, "auto"], [1536]]);
    applyPreset({}, {});
});

test("on Auto the numbers follow what the server tells, once", () => {
    const { node, sizes, preset, count, type } = engineNode(), told = portrait({ max_tokens: 308 });
    assert.equal(preset.value, "Auto: fits the model");
    sizes.know(nothing());
    assert.deepEqual([preset.value, sizesOf(node), count.changed], ["Auto: 512 to 1536 px (SDXL)", ZEROS, 0]);
    sizes.know(told);
    assert.deepEqual([preset.value, sizesOf(node), count.changed], ["Auto: 640×960, 1 image", told.auto, 1]);
    sizes.know(portrait({ max_tokens: 308 }));
    assert.equal(count.changed, 1, "nothing is written twice");
    sizes.know(undefined);
    assert.deepEqual([sizes.choice, preset.value], ["presetFit", "Auto: 640×960, 1 image"], "a node that is switched off keeps what it knew");
    sizes.choose("presetFit");
    sizes.know(sizes.sent);
    assert.deepEqual(sizesOf(node), AUTO_PORTRAIT, "tokens of a long prompt are forgotten, until the server tells of them anew");
    type("opt_size", 640);
    sizes.know(square());
    assert.equal(sizesOf(node).opt_size, 640);
});

test("numbers of one's own stay, whether typed, saved or written by others", () => {
    const typed = engineNode();
    typed.sizes.know(portrait());
    typed.type("max_size", 1280);
    typed.sizes.know(square());
    assert.deepEqual([typed.sizes.choice, sizesOf(typed.node).max_size, sizesOf(typed.node).opt_size], ["custom", 1280, 768]);
    assert.equal(typed.preset.value, "Custom: 512 to 1280 px, 1 image");
    const saved = engineNode({ min_size: 64, opt_size: 128, max_size: 512, max_images: 4, max_tokens: 616 });
    saved.sizes.know(portrait());
    assert.deepEqual([saved.sizes.choice, sizesOf(saved.node).opt_size, saved.preset.value],
        ["custom", 128, "Custom: 64 to 512 px, 4 images"]);
    const written = engineNode();
    written.sizes.know(portrait());
    written.node.widgets.find(({ name }) => name === "max_size").value = 900;
    written.sizes.know(square());
    assert.deepEqual([written.sizes.choice, sizesOf(written.node).max_size], ["custom", 900]);
});

test("what Auto wrote is Auto's after a reload too", () => {
    const { node, sizes } = engineNode(AUTO_PORTRAIT, { picture_sizes: "presetFit" });
    node.onConfigure();
    assert.equal(sizes.choice, "presetFit");
    sizes.know(square());
    assert.equal(sizesOf(node).opt_size, 512);
});

/** What is saved of a node: its values and what it was chosen. */
function saved({ node }) {
    const made = { widgets_values: node.widgets.map(({ value }) => value), properties: { ...node.properties } };
    node.onSerialize(made);
    return made;
}

test("what Auto follows is no edit: it is saved as zeros, whatever the picture", () => {
    const followed = new Map(), one = engineNode({}, {}, followed), before = saved(one);
    assert.deepEqual(before, { widgets_values: ["use native", 0, 0, 0, 0, 0], properties: {} });
    one.sizes.know(portrait({ max_tokens: 308 }));
    assert.deepEqual(sizesOf(one.node), { ...AUTO_PORTRAIT, max_tokens: 308 }, "prompts have the numbers");
    assert.deepEqual(saved(one), before);
    assert.equal(one.node.properties.picture_sizes, "presetFit", "the node itself keeps its choice");
    const old = engineNode(AUTO_PORTRAIT, { picture_sizes: "presetFit" });
    assert.deepEqual([sizesOf(old.node), saved(old)], [AUTO_PORTRAIT, before], "as Auto was saved before");

    const again = engineNode({}, {}, followed); // the page makes the node anew when something is undone
    again.node.onConfigure();
    assert.deepEqual([again.sizes.choice, sizesOf(again.node), again.count.changed], ["presetFit", { ...AUTO_PORTRAIT, max_tokens: 308 }, 0]);
    again.sizes.know(of(512, 512, { ...AUTO_SQUARE, max_tokens: 308 }));
    assert.deepEqual(sizesOf(again.node), { ...ZEROS, opt_size: 512, max_tokens: 308 });
    const own = engineNode({ ...ZEROS }, { picture_sizes: "custom" }, followed);
    own.node.onConfigure();
    assert.deepEqual([own.sizes.choice, sizesOf(own.node)], ["custom", ZEROS]);
});

test("numbers that somebody wrote over Auto's are saved as they are", () => {
    const written = engineNode();
    written.sizes.know(portrait());
    written.node.widgets.find(({ name }) => name === "max_size").value = 900;
    assert.deepEqual(saved(written), { widgets_values: ["use native", 0, 768, 900, 0, 0], properties: { picture_sizes: "custom" } });
});

test("a choice sets the numbers, Custom shows them, and that can be undone", () => {
    const { node, sizes, preset, count, pick } = engineNode();
    pick("SDXL");
    assert.deepEqual([sizes.choice, preset.value, sizesOf(node)], ["presetSdxl", "SDXL, all usual formats", PRESETS.presetSdxl]);
    const rows = () => node.getLayoutWidgets().some(({ name }) => name === "max_size");
    assert.equal(rows(), false, "numbers are folded");
    pick("Custom");
    assert.deepEqual([sizes.choice, node.showAdvanced, rows()], ["custom", true, true]);
    assert.deepEqual(sizesOf(node), PRESETS.presetSdxl, "they are where one begins");
    pick("Hide");
    assert.deepEqual([node.showAdvanced, rows()], [false, false]);
    pick("Auto");
    assert.deepEqual([sizes.choice, sizesOf(node)], ["presetFit", ZEROS]);
    pick("Apply to all");
    assert.deepEqual([count.toAll, preset.value], [1, preset.options.values[0]]);
});

test("a number from outside the subgraph is shown, and Auto is Auto again without it", () => {
    const { sizes, preset } = engineNode(), fits = of(1024, 1024, ZEROS);
    sizes.know(fits, { max_size: 768 });
    assert.equal(preset.value, preset.options.values[3]);
    assert.match(preset.value, /512.*768/, preset.value);
    sizes.know(fits, { max_size: 640 });
    assert.match(preset.value, /640/, "it follows the value");
    sizes.know(of(1024, 1024, ZEROS));
    assert.deepEqual([sizes.choice, preset.value], ["presetFit", preset.options.values[0]]);
});

test("a number that the page writes without telling its widget is of one's own", () => {
    const { node, sizes } = engineNode();
    sizes.choose("presetSdxl");
    node.widgets.find(({ name }) => name === "max_size").value = 2048;
    sizes.know(of(1024, 1024, ZEROS));
    assert.equal(sizes.choice, "custom");
});

test("the choice stands above the numbers, and is saved nowhere", () => {
    const { node, preset } = engineNode({ opt_size: 512 });
    assert.deepEqual(node.widgets.map(({ name }) => name).slice(0, 3), ["when_missing", "size_preset", "min_size"]);
    assert.deepEqual([preset.serialize, preset.options.serialize], [false, false]);
    const holes = ["use native"];
    [0, 512, 0, 0, 0].forEach((value, i) => { holes[i + 2] = value; });
    const saved = { widgets_values: holes };
    node.onSerialize(saved);
    assert.deepEqual(saved.widgets_values, ["use native", 0, 512, 0, 0, 0], "as it was saved before there was a choice");
});
