import assert from "node:assert/strict";
import { test } from "node:test";
import { numbersFromOutside, PRESETS } from "../../js/lib/presets.mjs";
import { mendValues, putValues } from "../../js/lib/saved_values.mjs";

const ZEROS = PRESETS.presetFit;
const COMBOS = {
    when_missing: ["use native", "build now", "build in background"], precision: ["auto", "float16"],
    backend: ["auto", "onnxruntime", "torch"], weights: ["built in", "replaceable"],
};
const OWN = { when_missing: "build now", min_size: 256, opt_size: 512, max_size: 768, max_images: 2, max_tokens: 77,
    precision: "float16", backend: "torch", weights: "replaceable" };
const DEFAULTS = { when_missing: "use native", ...ZEROS, precision: "auto", backend: "auto", weights: "built in" };

/** The widgets of an engine node, those of the page among them. */
function widgets(values = DEFAULTS) {
    const made = Object.entries(values).map(([name, value]) =>
        (name in COMBOS ? { name, type: "combo", value, options: { values: COMBOS[name] } } : { name, type: "number", value, options: {} }));
    made.splice(1, 0, { name: "size_preset", type: "combo", value: "Auto", serialize: false, options: { values: ["Auto"] } });
    return [...made, { name: "build_engine", type: "button", value: null, serialize: false }];
}
const valuesOf = (some) => Object.fromEntries(some.filter(({ serialize }) => serialize !== false).map(({ name, value }) => [name, value]));

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

/** What the pack's first version made of what a newer page saved: it looked for holes that there are none. */
function shifted(saved, some, zeros = {}) {
    const values = saved.widgets_values;
    return { ...saved, widgets_values: some.flatMap(({ name, serialize }, i) => (serialize === false ? [] : [zeros[name] ?? values[i] ?? null])) };
}

/** What a page makes of saved values: it reads them by place. */
function open(saved) {
    const some = widgets();
    some.filter(({ serialize }) => serialize !== false).forEach((widget, i) => { widget.value = saved.widgets_values[i]; });
    return some;
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

test("values that stand one place too early are mended by their names, and Auto stays Auto", () => {
    const damaged = shifted(savedBy("new", widgets(OWN)), widgets(OWN));
    const some = open(damaged);
    assert.notDeepEqual(valuesOf(some), OWN);
    assert.equal(mendValues(some, damaged, ZEROS, DEFAULTS), true);
    assert.deepEqual(valuesOf(some), OWN);
    const auto = shifted(savedBy("new", widgets(OWN)), widgets(OWN), ZEROS), opened = open(auto);
    assert.equal(mendValues(opened, auto, ZEROS, DEFAULTS), true);
    assert.deepEqual(valuesOf(opened), { ...OWN, ...ZEROS });
});

test("a workflow that was damaged twice keeps what can be told, and the rest is as on a new node", () => {
    const once = open(shifted(savedBy("new", widgets(OWN)), widgets(OWN)));
    const twice = shifted(savedBy("new", once), once), some = open(twice);
    assert.equal(mendValues(some, twice, ZEROS, DEFAULTS), true);
    const found = valuesOf(some);
    for (const [name, values] of Object.entries(COMBOS)) assert.ok(values.includes(found[name]), name);
    assert.equal(found.when_missing, "build now");
    assert.deepEqual([found.min_size, found.opt_size, found.max_size], [0, 0, 0], "sizes that nobody knows any more are Auto's");
});

test("workflows that are right stay as they are", () => {
    for (const saved of [savedBy("new", widgets(OWN)), { widgets_values: Object.values(OWN) },
        { widgets_values: Object.values(OWN).slice(0, -1) }, savedBy("old", widgets(OWN)), {}, undefined]) {
        const some = widgets(OWN);
        assert.equal(mendValues(some, saved, ZEROS, DEFAULTS), false);
        assert.deepEqual(valuesOf(some), OWN);
    }
});

test("numbers from outside are those of wired sizes that are known before the prompt runs", () => {
    const node = { inputs: [{ name: "model", link: 1 }, { name: "min_size", link: 2, widget: { name: "min_size" } },
        { name: "max_size", link: 3, widget: { name: "max_size" } }, { name: "opt_size", link: null, widget: { name: "opt_size" } },
        { name: "backend", link: 4, widget: { name: "backend" } }] };
    assert.deepEqual(numbersFromOutside(node, { min_size: 320, max_size: ["7", 0], opt_size: 512, backend: "torch" }), { min_size: 320 });
    assert.deepEqual(numbersFromOutside({}, {}), {});
});
