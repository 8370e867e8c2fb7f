import assert from "node:assert/strict";
import { test } from "node:test";
import { waitWords } from "../../js/lib/live.mjs";
import { LiveLink, Pace, takesLive } from "../../js/lib/live_link.mjs";

test("two frames are under way at most, and an answer or three seconds free their place", () => {
    const pace = new Pace();
    assert.deepEqual([pace.free(0), pace.send(0), pace.free(0), pace.send(10), pace.free(10)], [true, 0, true, 1, false]);
    pace.answer(1, 30); // the first one was dropped
    assert.deepEqual([pace.free(30), pace.send(30), pace.send(31), pace.free(32)], [true, 2, 3, false]);
    assert.equal(pace.free(3031), true);
});

test("as many frames more are under way as a stream keeps in work: their pictures come with later frames", async (context) => {
    let socket;
    const kept = { WebSocket: globalThis.WebSocket, location: globalThis.location };
    context.after(() => Object.assign(globalThis, kept));
    Object.assign(globalThis, { location: { href: "http://here/" }, WebSocket: class { constructor() { socket = this; } send() {} close() {} } });
    const api = { fetchApi: async () => new Response('{"token": "t"}'), apiURL: (path) => path };
    const link = new LiveLink(api, { ready() {}, picture() {}, refused() {}, ended() {}, lost() {} });
    await link.open();
    const hear = (message) => socket.onmessage({ data: JSON.stringify(message) });
    const underWay = () => {
        let count = 0;
        for (link.pace.sent = []; link.free; count += 1) link.send(new ArrayBuffer(0));
        return count;
    };
    hear({ ready: { steps: 4 } });
    assert.equal(underWay(), 2);
    hear({ ready: { steps: 4 }, steps_as_batch: true });
    assert.equal(underWay(), 5);
    hear({ changed: { seed: 3 } });
    assert.equal(underWay(), 5);
    hear({ changed: { steps: 2 } });
    assert.equal(underWay(), 3);
});

test("times of pictures are told: how many a second, the usual and the slowest, and the delay", () => {
    const pace = new Pace();
    for (let n = 0; n < 100; n += 1) {
        pace.send(100 * n);
        pace.answer(n, 100 * n + (n === 50 ? 60 : 30));
    }
    const { fps, p50, p99, delay } = pace.figures(9930);
    assert.deepEqual([Math.round(fps), p50, p99, delay], [10, 100, 130, 30]);
    assert.deepEqual(new Pace().figures(0), { fps: 0, p50: 0, p99: 0, delay: 0 });
});

test("a prompt takes live frames where nothing is wired into a stream's frames", () => {
    const stream = (inputs) => ({ 1: { class_type: "LoadImage", inputs: {} }, 2: { class_type: "TRTStream", inputs } });
    assert.equal(takesLive(stream({ steps: 1 })), true);
    assert.equal(takesLive(stream({ frames: ["1", 0] })), false);
    assert.equal(takesLive({ 1: { class_type: "LoadImage", inputs: {} } }), false);
});

test("a stream that waits for a build says what that does", () => {
    const job = { state: "running", phase: "compiling", percent: 40, seconds: 70, expected: 100 };
    assert.equal(waitWords(job), "TRT Stream waits for an engine: compiling, 40 %, 1 min 10 s of about 1 min 40 s");
    assert.equal(waitWords({ ...job, state: "done" }), "Starting TRT Stream: its models are loaded …");
});

