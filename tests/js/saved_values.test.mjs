import assert from "node:assert/strict";
import { test } from "node:test";
import { numbersFromOutside, PRESETS } from "../../js/lib/presets.mjs";
import { putValues } from "../../js/lib/picture_sizes.mjs";

const ZEROS = PRESETS.presetFit;
const OWN = { when_missing: "build now", min_size: 256, opt_size: 512, max_size: 768, max_images: 2, max_tokens: 77,
    precision: "float16", backend: "torch", weights: "replaceable" };
/** The widgets of an engine node, those of the page among them. */
function widgets(values) {
    const made = Object.entries(values).map(([name, value]) => ({ name, value }));
    made.splice(1, 0, { name: "size_preset", value: "Auto", serialize: false });
    return [...made, { name: "build_engine", value: null, serialize: false }];
}

/** How a page saves a node: up to 1.52 with holes, later without, and with names. */
function savedBy(page, some) {
    const saved = { widgets_values: [] };
    some.forEach(({ name, value, serialize }, place) => {
        if (serialize === false) return;
        saved.widgets_values[page === "old" ? place : saved.widgets_values.length] = value;
        if (page === "new") (saved.widgets_values_named ??= {})[name] = value;
    });
    return saved;
}

for (const page of ["old", "new"])
    test(`each value is saved at its own place on ${page} pages, Auto's sizes as zeros by name too`, () => {
        const saved = savedBy(page, widgets(OWN));
        putValues(widgets(OWN), saved, {});
        assert.deepEqual(saved.widgets_values, Object.values(OWN));
        const auto = savedBy(page, widgets(OWN));
        putValues(widgets(OWN), auto, ZEROS);
        assert.deepEqual(auto.widgets_values, Object.values({ ...OWN, ...ZEROS }));
        if (page === "new") assert.deepEqual(auto.widgets_values_named, { ...OWN, ...ZEROS });
        else assert.equal("widgets_values_named" in auto, false);
    });

test("numbers from outside are those of wired sizes that are known before the prompt runs", () => {
    const node = { inputs: [{ name: "model", link: 1 }, { name: "min_size", link: 2, widget: { name: "min_size" } },
        { name: "max_size", link: 3, widget: { name: "max_size" } }, { name: "opt_size", link: null, widget: { name: "opt_size" } },
        { name: "backend", link: 4, widget: { name: "backend" } }] };
    assert.deepEqual(numbersFromOutside(node, { min_size: 320, max_size: ["7", 0], opt_size: 512, backend: "torch" }), { min_size: 320 });
    assert.deepEqual(numbersFromOutside({}, {}), {});
});
