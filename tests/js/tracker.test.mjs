import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as wait } from "node:timers/promises";
import { Builder } from "../../js/lib/build.mjs";
import { Tracker } from "../../js/lib/tracker.mjs";
import { needs, together, usesOf } from "../../js/lib/workflow.mjs";

const SOON = 400;

/** A tracker on one engine node with a model, which counts its looks at the graph and its questions. */
function tracked() {
    const count = { looks: 0, questions: 0 }, server = { orders: {}, posts: [], node: { state: "none", build_helps: true, key: "k" } };
    const links = new Map([[0, { origin_id: 1, origin_slot: 0 }]]);
    const graph = { getLink: (id) => links.get(id), getNodeById: () => loader };
    const loader = { id: 1, comfyClass: "Loader", inputs: [], graph };
    const node = { id: 2, comfyClass: "TRTUNetEngine", inputs: [{ name: "model", type: "MODEL", link: 0 }], graph };
    const root = { found: [loader, node], get nodes() { count.looks += 0.5; return this.found; } }; // once for engine nodes, once for the prompt
    const api = { fetchApi: async (path, { body } = {}) => {
        if (path === "/prompt") return { ok: true, json: async () => ({ prompt_id: "p" }) };
        if (path.endsWith("/engines")) return { ok: true, json: async () => ({ engines: [{ name: "other" }, server.node.engine] }) };
        if (!path.endsWith("/nodes")) return server.posts.push([path, JSON.parse(body)]);
        count.questions += 1;
        server.workflow = JSON.parse(body).workflow;
        return { ok: true, json: async () => ({ nodes: { 2: server.node }, orders: { ...server.orders } }) };
    } };
    const tracker = new Tracker({ rootGraph: root }, api);
    const shown = [];
    tracker.views.set(node, { node, key: "", state: {}, show(state) { this.key = state.key; this.state = state; shown.push(state.state); } });
    return { tracker, count, shown, server, root };
}

test("the graph is looked at when it may have changed, however often that is said, and the server is asked otherwise", async () => {
    const { tracker, count, shown, server, root } = tracked();
    root.id = "w";
    for (let i = 0; i < 50; i++) tracker.changed();
    await wait(SOON);
    assert.deepEqual([count, shown], [{ looks: 1, questions: 1 }, ["none"]]);
    assert.equal(server.workflow, "w", "last runs are asked for by the open workflow");
    for (let i = 0; i < 50; i++) tracker.soon();
    await wait(SOON);
    assert.deepEqual(count, { looks: 1, questions: 2 });
});

test("nodes of a workflow that was left are forgotten, whether they were seen or not; what is being made is kept", async () => {
    const { tracker, root } = tracked(), [open] = tracker.views.values();
    const made = (graph, id) => {
        const node = { id, comfyClass: "TRTUNetEngine", graph };
        tracker.views.set(node, { node, key: "", state: {}, show() {} });
        return node;
    };
    const inside = { id: "part", getNodeById: () => made.inside }; // a subgraph of which no node stands in the graph yet
    root.subgraphs = new Map([["part", inside]]);
    made.inside = made(inside, 9);
    root.getNodeById = () => ({}); // LGraph.clear leaves nodes their graph, in which others get their ids
    made(root, 2);
    made({ id: "part", getNodeById: () => null }, 10); // of a workflow that had a subgraph of the same id
    assert.deepEqual(tracker.present, []);
    await tracker.refresh();
    assert.deepEqual([[...tracker.views.keys()], tracker.present], [[open.node, made.inside], [open]]);
    root.found = [];
    tracker.changed();
    await tracker.refresh();
    assert.deepEqual([[...tracker.views.keys()], tracker.present], [[made.inside], []]);
});

test("the end of builds that took long together is told until it is closed, and that of short ones is not", async (context) => {
    context.mock.timers.enable({ apis: ["Date"] });
    for (const [each, last] of [[15, ["2 engines built", true]], [2, ["Engine built", false]]]) {
        const { tracker, server } = tracked(), told = [], builder = new Builder(tracker, (_, summary, __, stays) => told.push([summary, stays]));
        const job = (id, state) => ({ id, keys: ["k"], label: "net", seconds: 0, state, engine: "e" });
        await tracker.refresh();
        await builder.hear(job("a", "running"));
        await builder.hear(job("b", "queued"));
        server.node = { state: "ready", key: "k", engine: { name: "e", bytes: 1 } };
        context.mock.timers.tick(1000 * each);
        await builder.hear(job("a", "done"));
        await builder.hear(job("b", "running"));
        context.mock.timers.tick(1000 * each);
        await builder.hear(job("b", "done"));
        assert.deepEqual(told, [["Engine built", false], last]);
    }
});

test("the end of a build is told once, of the view that is there, or of the library where its workflow was left", async () => {
    for (const left of [false, true]) {
        const { tracker, root, server } = tracked(), toasts = [], [view] = tracker.views.values();
        const builder = new Builder(tracker, (...words) => toasts.push(words.slice(0, 2).join(" "))), job = { id: "j", keys: ["k"], label: "net", seconds: 1 };
        const dead = { node: { id: 2, comfyClass: "TRTUNetEngine", graph: {} }, state: { state: "none", key: "k" }, show() {} };
        tracker.views = new Map([[dead.node, dead], ...tracker.views]); // as after the workflow was opened anew
        await tracker.refresh();
        await builder.build([view]);
        if (left) root.found = [];
        tracker.changed();
        await tracker.refresh();
        await builder.hear({ ...job, state: "running", percent: 1 });
        server.node = { state: "ready", key: "k", engine: { name: "e", bytes: 1 } };
        for (let i = 0; i < 2; i++) await builder.hear({ ...job, state: "done", engine: "e" });
        assert.deepEqual(toasts, ["success Engine built"]);
        await builder.hear({ ...job, id: "theirs", keys: ["another"], state: "failed", message: "no" });
        assert.equal(toasts.length, 1, "nobody here ordered that one");
        builder.ours.add("k");
        await builder.hear({ ...job, id: "failing", state: "failed", message: "no" });
        assert.equal(toasts.length, 2);
    }
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

test("what was ordered is what the server's queue says, once a prompt is in it", async () => {
    const { tracker, shown, server } = tracked(), builder = new Builder(tracker, () => {});
    const [view] = tracker.views.values();
    await tracker.refresh();
    server.orders = { p: ["k"] };
    await builder.press(view);
    assert.deepEqual([view.state.state, tracker.asked.size], ["asked", 0]);
    server.orders = {}; // taken out of the queue, or the server has restarted
    await tracker.refresh();
    assert.deepEqual(shown, ["none", "asked", "asked", "none"]);
    await builder.press(view); // in no queue when the page asks: it was quick
    assert.deepEqual([view.state.state, tracker.asked.size], ["none", 0]);
});

test("a press right after the graph has changed orders the size that the server then tells", async () => {
    const { tracker, server, root } = tracked(), builder = new Builder(tracker, () => {}), [view] = tracker.views.values(), sent = [];
    const size = { name: "opt_size", value: 0 }, picture = { name: "width", value: 512 }, { fetchApi } = tracker.api;
    view.node.widgets = [size];
    root.found.push({ id: 3, comfyClass: "EmptyLatentImage", inputs: [], widgets: [picture] });
    view.show = function (state) {
        this.state = state;
        if (state.sizes && size.value !== state.sizes.opt_size) {
            size.value = state.sizes.opt_size;
            tracker.changed();
        }
    };
    tracker.api.fetchApi = async (path, options) => {
        const { prompt } = JSON.parse(options.body);
        if (path === "/prompt") sent.push(prompt[2].inputs.opt_size);
        else server.node = { ...server.node, sizes: { opt_size: prompt[3].inputs.width } };
        return fetchApi(path, options);
    };
    await tracker.settle();
    assert.equal(size.value, 512);
    picture.value = 768;
    tracker.changed();
    const asking = tracker.refresh(); // its answer is still to come
    await builder.press(view);
    picture.value = 640;
    tracker.changed();
    await builder.press(view);
    assert.deepEqual(sent, [768, 640]);
    await asking;
});

test("Auto follows no answer to a graph that has changed since the question", async () => {
    const { tracker, server } = tracked(), [view] = tracker.views.values(), followed = [];
    view.show = ({ sizes }) => followed.push(sizes.auto);
    server.node.sizes = { auto: { max_tokens: 616 } };
    const asking = tracker.refresh();
    tracker.changed(); // by a click on Auto, which takes 616 away
    server.node = { ...server.node, sizes: { auto: { max_tokens: 0 } } };
    await asking;
    await tracker.settle();
    assert.deepEqual(followed, [null, { max_tokens: 0 }]);
});

test("what another tab ordered is seen, and cancelled at once although the queue holds its prompt a while", async () => {
    const { tracker, server } = tracked(), builder = new Builder(tracker, () => {}), [view] = tracker.views.values();
    server.orders = { other: ["another key"], theirs: ["k", "another key"] };
    await tracker.refresh();
    assert.equal(view.state.state, "asked");
    await builder.cancelAll([view]);
    assert.deepEqual(server.posts, [["/queue", { delete: ["theirs"] }], ["/interrupt", { prompt_id: "theirs" }]]);
    assert.equal(view.state.state, "none");
    server.orders = {};
    await tracker.refresh();
    assert.equal(tracker.over.size, 0);
});

test("a node says why its order failed, also when its workflow was opened anew meanwhile, or the queue was quicker", async () => {
    for (const orders of [{ p: ["k"] }, {}]) {
        const { tracker, server } = tracked(), builder = new Builder(tracker, () => {}), [view] = tracker.views.values();
        server.orders = orders;
        await (orders.p ? tracker.refresh() : builder.press(view));
        await builder.promptEnded("p", "no such file");
        assert.deepEqual([view.state.state, view.state.text], ["failed", "no such file"]);
        await tracker.refresh();
        assert.equal(view.state.state, "failed");
    }
});

test("a node of a subgraph that is used twice shows the worse of its two engines, and both are ordered, counted, heard of", async () => {
    const told = { "7:2": { state: "ready", key: "a", engine: { covers: true } }, "8:2": { state: "none", build_helps: true, key: "b" } };
    const graph = { getLink: (id) => links.get(id), getNodeById: (id) => subgraph.nodes.find((node) => node.id === id) };
    const links = new Map([[0, { origin_id: 1, origin_slot: 0 }]]), posts = [];
    const loader = { id: 1, comfyClass: "Loader", inputs: [], graph };
    const node = { id: 2, comfyClass: "TRTUNetEngine", inputs: [{ name: "model", type: "MODEL", link: 0 }], graph };
    const subgraph = { nodes: [loader, node] };
    const uses = [7, 8].map((id) => ({ id, inputs: [], subgraph, isSubgraphNode: () => true }));
    const tracker = new Tracker({ rootGraph: { nodes: uses } }, { fetchApi: async (path, { body }) => {
        const sent = JSON.parse(body);
        posts.push(path === "/prompt" ? Object.keys(sent.prompt).sort() : sent.nodes);
        return { ok: true, json: async () => (path === "/prompt" ? { prompt_id: "p" } : { nodes: told, orders: {} }) };
    } });
    const view = { node, state: {}, show(state) { this.state = state; } };
    const states = () => usesOf(view.state).map(({ state, key }) => `${key} ${state}`);
    tracker.views.set(node, view);
    await tracker.refresh();
    assert.deepEqual([posts.pop(), states()], [[["7:2", "8:2"]], ["b none", "a ready"]]);
    assert.deepEqual(needs(usesOf(view.state)), { ready: 1, missing: 1, busy: 0, total: 2, unable: 0, building: 0, unsure: 0, seconds: null });

    const builder = new Builder(tracker, () => {});
    await builder.build([view]);
    assert.deepEqual(posts[0], ["8:1", "8:2", "hybrid_trt_build"], "what is there is not built again beside what is not");
    tracker.hear({ id: "j", keys: ["a"], state: "running", percent: 1 });
    assert.deepEqual(states(), ["a building", "b none"]);
    Object.assign(told["7:2"], { state: "none", build_helps: true });
    await tracker.refresh();
    posts.length = 0;
    await builder.build([view]);
    assert.deepEqual(posts[0], ["7:1", "7:2", "8:1", "8:2", "hybrid_trt_build", "hybrid_trt_build_1"]);
    told["7:2"].key = "b"; // the same model in both
    await tracker.refresh();
    assert.deepEqual(states(), ["b none"]);
    const [fits, misfit] = [undefined, {}].map((misfit) => ({ state: "none", key: "b", misfit }));
    assert.deepEqual([together([fits, misfit]), together([misfit, fits])], [misfit, misfit], "that the other does not fit is told");
});

test("builds that a restart of the server lost are told, once; what it still knows is not", async () => {
    const { tracker } = tracked(), toasts = [], builder = new Builder(tracker, (...words) => toasts.push(words));
    let asked = 0, known = [{ id: "kept", state: "running" }];
    tracker.api = { fetchApi: async (path) => {
        asked += path.endsWith("/builds");
        return { ok: true, json: async () => known };
    } };
    await builder.reconnected();
    assert.equal(asked, 0, "nothing was under way");
    for (const id of ["kept", "lost"]) await builder.hear({ id, keys: [], label: `${id}.safetensors`, state: "running" });
    await builder.hear({ id: "over", keys: [], label: "over", state: "running" });
    await builder.hear({ id: "over", keys: [], label: "over", state: "done" });
    for (let i = 0; i < 2; i++) await builder.reconnected();
    assert.deepEqual(toasts, [["warn", "Build lost", "The server was started anew, which ended: lost.safetensors. Press Build engine again."]]);
});
