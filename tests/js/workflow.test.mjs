import assert from "node:assert/strict";
import { test } from "node:test";
import { buildPrompt } from "../../js/lib/graph.mjs";
import { isMissing, needs, progress } from "../../js/lib/workflow.mjs";
import { headline, offer } from "../../js/lib/workflow_view.mjs";

const none = (key, seconds) => ({ state: "none", build_helps: true, key, outlook: { seconds } });
const unknown = (key, there) => ({ state: "unknown", build_helps: true, key, there });
const ready = (key, covers = true) => ({ state: "ready", build_helps: !covers, key, engine: { covers } });
const building = (key, percent, expected, seconds) => ({ state: "building", key, job: { percent, expected, seconds } });

test("a workflow lacks what a build would give, each engine once, and its time is the sum where each is known", () => {
    const states = [none("a", 60), none("a", 60), none("b", 30), ready("c"), { state: "off", key: "d" }, { state: "unavailable", key: "e" }];
    assert.deepEqual(needs(states), { ready: 1, missing: 2, busy: 0, total: 3, unable: 1, building: 0, unsure: 0, seconds: 90 });
    assert.equal(needs([none("a", 60), none("b", null)]).seconds, null);
    assert.deepEqual(needs([ready("a"), ready("b")]), { ready: 2, missing: 0, busy: 0, total: 2, unable: 0, building: 0, unsure: 0, seconds: 0 });
});

test("what the server says a build helps, or what lacks sizes, is built by Build all; what is under way is not", () => {
    for (const state of ["none", "stale", "failed"]) assert.equal(isMissing({ state, build_helps: true }), true, state);
    for (const state of ["asked", "queued", "building"]) assert.equal(isMissing({ state, build_helps: true }), false, state);
    for (const more of [{ state: "unavailable", build_helps: false }, { state: "off" }, { state: "unwired" }]) assert.equal(isMissing(more), false);
    assert.equal(isMissing(ready("a")), false);
    assert.equal(isMissing(ready("a", false)), true);
    assert.equal(isMissing({ ...ready("a"), uncompiled: { width: 832, height: 1216, images: 1 } }), true);
    assert.equal(isMissing({ ...ready("a"), run: { uncompiled: [{ size: "832x1216, 154 tokens" }] } }), true);
    assert.equal(isMissing({ ...ready("a"), run: { uncompiled: [] } }), false);
});

test("a workflow's line is true of models without an engine, of builds that wait, and of engines that may be there", () => {
    const unable = { state: "unavailable", key: "u" }, asked = (key) => ({ state: "asked", key });
    assert.equal(headline(needs([ready("a"), ready("b")]), 0), "All engines of this workflow are ready (2)");
    assert.equal(headline(needs([ready("a"), ready("b"), unable]), 0), "Engines ready: 2; models that cannot use one: 1");
    assert.equal(headline(needs([asked("a"), asked("b")]), 2), "Engines waiting to be built: 2");
    assert.equal(headline(needs([building("a", 5, 100, 5), asked("b")]), 2), "Building engine 1 of 2");
    assert.match(offer(needs([none("a"), none("b")])), /^Build 2 missing engines/);
    assert.match(offer(needs([none("a"), unknown("b", null)])), /^Build up to 2 missing engines/);
    assert.match(offer(needs([none("a"), unknown("b", false)])), /^Build 2 missing engines/);
    const known = [none("a"), none("c"), unknown("b", true)];
    assert.match(offer(needs(known)), /^Build 2 missing engines/);
    assert.equal(headline(needs(known), 0), "2 of 3 engines are missing");
    assert.equal(headline(needs(known.slice(2)), 0), "The engine of this workflow is ready");
});

test("the time left goes down while a build runs", () => {
    assert.equal(needs([building("a", 25, 100, 25), none("b", 40)]).seconds, 115);
    assert.equal(needs([building("a", 99, 100, 140)]).seconds, 0);
});

test("the share that is done goes from nothing to all, and never back", () => {
    const weights = new Map();
    const shares = [
        [none("a", 30), none("b", 10)].map((state) => ({ ...state, state: "asked" })),
        [building("a", 50, 30, 15), { state: "queued", key: "b", job: { percent: 0, expected: 10 } }],
        [ready("a"), building("b", 50, 10, 5)],
        [ready("a"), ready("b")],
    ].map((states) => progress(states, weights));
    assert.deepEqual(shares, [0, 15 / 40, 35 / 40, 1]);
});

test("one prompt orders several builds, an output behind each", () => {
    const prompt = { 1: { class_type: "Loader", inputs: {} }, 2: { class_type: "TRTUNetEngine", inputs: { model: ["1", 0] } },
        3: { class_type: "TRTControlNetEngine", inputs: {} }, 4: { class_type: "SaveImage", inputs: { images: ["2", 0] } } };
    const made = buildPrompt(prompt, ["2", "3", "99"]);
    assert.deepEqual(Object.keys(made).sort(), ["1", "2", "3", "hybrid_trt_build", "hybrid_trt_build_1"]);
    assert.deepEqual(made.hybrid_trt_build_1.inputs.after, ["3", 0]);
});
