import assert from "node:assert/strict";
import { test } from "node:test";
import { buttonLabel, describe, logLines, tone } from "../../js/lib/words.mjs";
import { nextIndex } from "../../js/lib/menu.mjs";
import {
    anyEnded, deleteQuestion, engineRow, grouped, jobLines, matching, shownJobs, SORT_KEYS, withJob,
} from "../../js/lib/panel_words.mjs";
import { t } from "../../js/lib/texts.mjs";

const job = (id, state, more) => ({ id, state, label: "m", wanted: "w", message: "", percent: 5, phase: "p", seconds: 1, ...more });
const engine = (name, label, created, last_used, bytes, more) =>
    ({ name, label, state: "ready", kind: "unet", backend: "torch", precision: "float16", profile: "64-512 px", created, last_used, bytes, ...more });
const LIST = [
    engine("x2", "net 10", "2026-03-01T00:00:00Z", null, 5e9), engine("x1", "net 9", "2026-01-01T00:00:00Z", "2026-11-01T00:00:00Z", 1e9),
    engine("x3", "net 10", "2026-02-01T00:00:00Z", "2026-10-01T00:00:00Z", 2e9), { name: "bad", state: "broken", bytes: 9e9, reason: "cut short" },
];

test("the panel filters by all words", () => {
    assert.deepEqual(matching(LIST, "NET torch 9").map((e) => e.name), ["x1"]);
    assert.deepEqual(matching(LIST, "damaged").map((e) => e.name), ["bad"]);
    assert.equal(matching(LIST, "").length, 4);
});

test("engines stand model by model, in the order that was asked for, and damaged ones last", () => {
    const order = (key) => grouped(LIST, key).map(({ label, engines }) => [label, ...engines.map((e) => e.name)].join(" "));
    assert.deepEqual(order("sortName"), ["net 9 x1", "net 10 x2 x3", "Damaged bad"]);
    assert.deepEqual(order("sortDate"), ["net 10 x2 x3", "net 9 x1", "Damaged bad"]);
    assert.deepEqual(order("sortSize"), ["net 10 x2 x3", "net 9 x1", "Damaged bad"]);
    assert.deepEqual(order("sortUsed"), ["net 9 x1", "net 10 x3 x2", "Damaged bad"]);
    assert.equal(grouped(LIST, "sortName")[1].bytes, 7e9);
    for (const key of SORT_KEYS) assert.notEqual(t(key), key);
});

test("an engine is two lines, and a damaged one says what to do and keeps the rest for who asks", () => {
    const row = engineRow({ ...LIST[1], seconds: 70, rel_err: 1e-6 });
    assert.equal(row.title, "64-512 px, torch, float16");
    assert.equal(engineRow({ ...LIST[1], changes: "LoRA style x 0.8" }).title, "LoRA style x 0.8, 64-512 px, torch, float16");
    assert.match(deleteQuestion([{ ...LIST[1], changes: "LoRA style x 0.8" }]).text, /LoRA style x 0.8, 64-512 px/);
    assert.match(row.meta, /^✓ Ready · 1.0 GB · used /);
    assert.match(engineRow(LIST[1], "sortDate").meta, / · built /);
    assert.ok(row.details.some((line) => line.includes("differs by < 0.001 %")) && row.details.some((line) => line.startsWith("last used ")));
    assert.ok(engineRow({ ...LIST[1], rel_err: 1e-3, native_rel_err: 2e-3 }).details.includes("differs by 0.1 % from float32, the normal model by 0.2 %"));
    assert.match(engineRow(LIST[0]).meta, /not used yet$/);
    const damaged = engineRow(LIST[3]);
    assert.equal(damaged.meta, "✕ Damaged; delete it · 9.0 GB");
    assert.ok(damaged.details.includes("cut short") && !damaged.meta.includes("cut short"));
    assert.deepEqual([tone("broken"), tone("unchecked"), engineRow({ ...LIST[0], state: "unchecked" }).meta.slice(0, 18)], ["bad", "warn", "? Not checked here"]);
    assert.deepEqual([describe({ state: "unchecked", text: "", run: null }).tone, buttonLabel("unchecked")], ["warn", "Check engine"]);
});

test("live jobs come first, and one that waits says what it waits for", () => {
    const jobs = [job(1, "done"), job(2, "failed"), job(3, "done"), job(4, "done"), job(5, "queued"), job(6, "running"), job(7, "queued")];
    assert.deepEqual(shownJobs(jobs).map((j) => j.id), [6, 5, 7, 4, 3, 2]);
    assert.deepEqual(jobLines(jobs[5]), ["m · ▶ Running 5 %", "p, 1 s · w"]);
    assert.deepEqual(jobLines(jobs[6], 2), ["m · … Waiting", "waits for 2 before it · w"]);
    assert.deepEqual([jobLines(jobs[0]), jobLines({ ...jobs[1], message: "It broke." })], [["m · ✓ Done"], ["m · ✕ Build failed", "It broke."]]);
    assert.deepEqual([anyEnded(jobs), anyEnded(jobs.slice(4))], [true, false]);
});

test("an event brings its job without a question to the server, and an end is more than progress", () => {
    const before = [job(1, "done"), job(2, "running")];
    const further = withJob(before, job(2, "running", { percent: 40 }));
    assert.deepEqual([further.jobs[1].percent, further.ended], [40, false]);
    assert.deepEqual(withJob(before, job(3, "queued")).jobs.map((j) => j.id), [1, 2, 3]);
    assert.equal(withJob(before, job(2, "failed")).ended, true);
});

test("a question before engines are deleted is named for what it does", () => {
    const one = deleteQuestion(LIST.slice(1, 2)), many = deleteQuestion(LIST.slice(0, 3)), damaged = deleteQuestion(LIST.slice(3));
    assert.deepEqual([one.title, one.yes, one.danger], ["Delete engine?", "Delete", true]);
    assert.match(one.text, /^net 9, 64-512 px \(1.0 GB\)\./);
    assert.deepEqual([many.title, many.text.includes("8.0 GB")], ["Delete 3 engines?", true]);
    assert.equal(damaged.text, "bad (9.0 GB) is damaged and is not used.");
});

test("arrow keys go round in a menu", () => {
    assert.deepEqual([["ArrowDown", 2], ["ArrowUp", 0], ["Home", 1], ["End", 0], ["a", 0]].map(([key, at]) => nextIndex(key, at, 3)), [0, 2, 0, 2, null]);
});

test("a build's log is told without what every process of ComfyUI says when it starts", () => {
    const log = ["[0.0 s] reading weights", "Found comfy_kitchen backend cuda: {'available': False}", "Checkpoint files will always be loaded safely.",
        "Total VRAM 24106 MB, total RAM 24106 MB", "pytorch version: 2.11.0+cu130", "Set vram state to: DISABLED", "Device: cpu",
        "Using sub quadratic optimization for attention, if you have memory or speed issues try using: --x", "UserWarning: a device was slow",
        "[5.0 s] It broke."];
    assert.deepEqual(logLines(log, "It broke."), [log[0], log[8], log[9]]);
    assert.deepEqual(logLines(log.slice(0, 2), "It broke."), [log[0], "", "It broke."]);
    assert.deepEqual(logLines(log.slice(0, 1)), [log[0]]);
});
