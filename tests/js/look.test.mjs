import assert from "node:assert/strict";
import { test } from "node:test";
import { Look } from "../../js/lib/look.mjs";

globalThis.LiteGraph ??= { isValidConnection: (a, b) => a === b || a === "*" || b === "*" };

/** A graph of ComfyUI's page, as far as a look at it goes. `wires`: [from, output, to, input]; -10 and -20 are a subgraph's ends. */
function graph(nodes, wires = []) {
    const made = { nodes, links: new Map(), getLink: (id) => made.links.get(id),
        getNodeById: (id) => nodes.find((node) => String(node.id) === String(id)) };
    wires.forEach(([origin_id, origin_slot, target_id, target_slot], id) => {
        made.links.set(id, { origin_id, origin_slot, target_id, target_slot, originIsIoNode: origin_id === -10 });
        if (target_id !== -20) made.getNodeById(target_id).inputs[target_slot].link = id;
    });
    const ends = (slot) => [...made.links.values()].filter((link) => link.target_id === -20 && link.target_slot === slot);
    made.outputNode = { slots: [0, 1, 2].map((slot) => ({ getLinks: () => ends(slot) })) };
    for (const node of nodes) node.graph = made;
    return made;
}

function node(id, comfyClass, inputs = [], widgets = {}, more = {}) {
    return {
        id, comfyClass, type: comfyClass, mode: 0, ...more,
        inputs: inputs.map((name) => ({ name, type: name.toUpperCase(), link: null })),
        outputs: [{ type: "MODEL" }, { type: "CLIP" }],
        widgets: Object.entries(widgets).map(([name, value]) => ({ name, value, options: {} })),
        getInputLink(slot) { return this.graph.getLink(this.inputs[slot]?.link); },
    };
}

const loader = (id = 1) => node(id, "Loader", [], { ckpt_name: "a" });
const lora = (id = 2, more = {}) => node(id, "Lora", ["model", "clip"], { strength: 0.5 }, more);
const engine = (id = 3) => node(id, "TRTUNetEngine", ["model"], { max_size: 512 });
const virtual = (id, type) => node(id, type, ["*"], {}, { isVirtualNode: true });

test("links and values are those of the graph, and lists are no links", () => {
    const list = node(4, "List", [], { points: [1, 2] });
    list.widgets.push({ name: "quiet", value: 1, options: { serialize: false } }, { name: "curve", type: "curve", value: [1, 2] });
    const prompt = new Look(graph([loader(), engine(), list], [[1, 0, 3, 0]])).prompt(["3", "4"]);
    assert.deepEqual(prompt[3], { class_type: "TRTUNetEngine", inputs: { max_size: 512, model: ["1", 0] } });
    assert.deepEqual(prompt[1].inputs, { ckpt_name: "a" });
    assert.deepEqual(prompt[4].inputs, { points: { __value__: [1, 2] }, curve: { __type__: "CURVE", __value__: [1, 2] } });
});

test("nothing is serialised, and what nobody depends on is not even read, but for sizes", () => {
    let asked = 0;
    const camera = node(5, "Camera", [], { width: 640 });
    const stream = { name: "image", get value() { asked += 1; return ""; }, serializeValue() { asked += 1; } };
    camera.widgets.push(stream);
    const prompt = new Look(graph([loader(), engine(), camera], [[1, 0, 3, 0]])).prompt(["3"]);
    assert.deepEqual([prompt[5].inputs, asked], [{ width: 640 }, 0]);
});

test("a bypassed node passes its input on, a muted one nothing", () => {
    const look = (mode) => new Look(graph([loader(), lora(2, { mode }), engine()], [[1, 0, 2, 0], [1, 1, 2, 1], [2, 0, 3, 0]]))
        .prompt(["3"]);
    assert.deepEqual(look(4)[3].inputs.model, ["1", 0]);
    assert.equal(look(2)[3].inputs.model, undefined);
    assert.deepEqual([2 in look(4), 2 in look(2)], [false, false]);
});

test("reroutes are looked through, and a primitive's value is the widget's", () => {
    const reroute = virtual(7, "Reroute"), primitive = virtual(8, "PrimitiveNode");
    primitive.widgets = [{ name: "value", value: 0.9 }];
    const above = node(2, "Lora", ["model", "strength"], { strength: 0.5 });
    above.inputs[1].widget = { name: "strength" };
    const prompt = new Look(graph([loader(), reroute, above, engine(), primitive],
        [[1, 0, 7, 0], [7, 0, 2, 0], [2, 0, 3, 0], [8, 0, 2, 1]])).prompt(["3"]);
    assert.deepEqual(prompt[2].inputs, { strength: 0.9, model: ["1", 0] });
    assert.deepEqual(Object.keys(prompt).sort(), ["1", "2", "3"]);
});

test("a subgraph's nodes have the ids of its uses, and take from outside what it takes", () => {
    const inner = graph([lora(5), engine(6)], [[-10, 0, 5, 0], [5, 0, 6, 0], [5, 1, -20, 0]]);
    const use = (id, more = {}) => ({ ...node(id, "S", ["model"]), isVirtualNode: true, isSubgraphNode: () => true, subgraph: inner, ...more });
    const after = node(9, "Text", ["clip"]);
    const prompt = new Look(graph([loader(), use(2), use(3, { mode: 4 }), after], [[1, 0, 2, 0], [2, 0, 9, 0]])).prompt(["2:6"]);
    assert.deepEqual(Object.keys(prompt).sort(), ["1", "2:5", "2:6", "9"], "what is inside a bypassed one is not run");
    assert.deepEqual([prompt["2:5"].inputs.model, prompt["2:6"].inputs.model, prompt[9].inputs.clip],
        [["1", 0], ["2:5", 0], ["2:5", 1]]);
});

test("a widget that a subgraph shows outside has the value of outside", () => {
    const above = lora(5);
    above.inputs.push({ name: "strength", type: "FLOAT", link: null, widget: { name: "strength" } });
    const inner = graph([above, engine(6)], [[-10, 0, 5, 2], [5, 0, 6, 0]]);
    const use = { ...node(2, "S", ["strength"]), isVirtualNode: true, isSubgraphNode: () => true, subgraph: inner,
        widgets: [{ name: "strength", widgetId: "w", value: 0.25 }] };
    use.inputs[0].widgetId = "w";
    assert.equal(new Look(graph([use])).prompt(["2:6"])["2:5"].inputs.strength, 0.25);
});

test("loops and links to nothing end the look", () => {
    const round = graph([virtual(7, "Reroute"), virtual(8, "Reroute"), engine()], [[8, 0, 7, 0], [7, 0, 8, 0], [8, 0, 3, 0]]);
    assert.deepEqual(new Look(round).prompt(["3"])[3].inputs, { max_size: 512 });
    const lost = graph([engine()]);
    lost.nodes[0].inputs[0].link = 99;
    assert.deepEqual(new Look(lost).prompt(["3"])[3].inputs, { max_size: 512 });
    assert.deepEqual(new Look(undefined).prompt([]), {});
});

test("what a serialiser gave when ComfyUI queued is known until the value changes", () => {
    const above = lora();
    const widget = { name: "rows", value: { on: true, extra: 1 }, serializeValue: () => assert.fail("serialised to look") };
    above.widgets.push(widget);
    const root = graph([loader(), above, engine()], [[1, 0, 2, 0], [2, 0, 3, 0]]);
    assert.deepEqual(new Look(root).prompt(["3"])[2].inputs.rows, { on: true, extra: 1 });
    new Look(root).learn({ 3: { inputs: { model: ["2", 0] } }, 2: { inputs: { rows: { on: true }, model: ["1", 0] } } }, ["3"]);
    assert.deepEqual(new Look(root).prompt(["3"])[2].inputs.rows, { on: true });
    widget.value = { on: false, extra: 1 };
    assert.deepEqual(new Look(root).prompt(["3"])[2].inputs.rows, { on: false, extra: 1 });
});

test("a build serialises what its node depends on, and nothing else", async () => {
    const asked = [];
    const above = lora(), beside = node(5, "Camera");
    for (const one of [above, beside])
        one.widgets.push({ name: "rows", value: 1, serializeValue: async () => { asked.push(one.id); return [2]; } });
    const root = graph([loader(), above, engine(), beside], [[1, 0, 2, 0], [2, 0, 3, 0]]);
    assert.deepEqual((await new Look(root).serialised("3"))[2].inputs.rows, { __value__: [2] });
    assert.deepEqual(asked, [2]);
    assert.deepEqual(new Look(root).prompt(["3"])[2].inputs.rows, { __value__: [2] }, "its node is known by what was sent");
});
