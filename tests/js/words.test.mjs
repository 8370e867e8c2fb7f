import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { promptError, refusal, runError } from "../../js/lib/build.mjs";
import { offer } from "../../js/lib/presets.mjs";
import { said } from "../../js/lib/server_zh.mjs";
import { defaultsFor, settings } from "../../js/lib/settings.mjs";
import { toneOf } from "../../js/lib/text_view.mjs";
import { keys, setLanguage, t } from "../../js/lib/texts.mjs";
import { buttonLabel, describe, duration, elapsed, error, runWords, size } from "../../js/lib/words.mjs";

const ENGINE = { backend: "onnxruntime", precision: "float16", profile: "64-512 px", bytes: 3.2e6, covers: true };
const REASON = { reason: "size the engine was not built for", count: 3, text: "size the engine was not built for: width 768 px", advice: "widen the profile" };

test("every language has every text, and gaps are filled", () => {
    const { en, zh } = keys();
    assert.deepEqual(zh, en);
    assert.equal(t("use", { count: 2, size: "1 GB", free: "9 GB" }), "2 engines, 1 GB; 9 GB free");
    setLanguage("zh-TW");
    assert.equal(t("build"), "构建引擎");
    setLanguage("fr");
    assert.equal(t("build"), "Build engine");
});

test("no text is written over by another one of the same name", () => {
    const code = readFileSync(new URL("../../js/lib/texts.mjs", import.meta.url), "utf8");
    for (const [i, part] of code.split(/\n {4}zh: /).entries()) {
        const names = [...part.matchAll(/(?:^ {8}|[,{] )(\w+): ["`]/gm)].map(([, name]) => name);
        assert.ok(names.length > 100, `language ${i}`);
        assert.deepEqual(names.filter((name, at) => names.indexOf(name) !== at), []);
    }
});

test("numbers as people say them", () => {
    assert.deepEqual([size(3.24e6), size(1.7e9), size(undefined)], ["3.2 MB", "1.7 GB", "?"]);
    assert.deepEqual([duration(0), duration(59.9), duration(125), duration(undefined)], ["0 s", "59 s", "2 min 5 s", "?"]);
    assert.deepEqual([2.3e-6, 2.34e-5, 0.0212, 0.25, null].map(error), ["< 0.001 %", "0.0023 %", "2.1 %", "25 %", "?"]);
});

test("the expected time is told until it has passed, and never guessed", () => {
    const said = (seconds, expected) => elapsed({ seconds, expected });
    assert.deepEqual([said(12, 40.3), said(12, null), said(12, undefined), said(41, 40.3)],
        ["12 s of about 40 s", "12 s", "12 s", "41 s"]);
});

test("what the server says is read in Chinese, names and figures as they are", () => {
    const report = "Accelerated: 2 of 3 models, 9 of 11 calls; about 4.6 s at normal speed. -> Build 1 missing engine";
    assert.equal(said(report), report);
    setLanguage("zh");
    const read = [report, "Accelerated: 3 of 3 models, about 2.3x faster than without", "canny: 4 on torch, 8.9 ms each, 2 at normal speed, 40 ms each (no engine)",
        "up to 4 images, 64 to 512 px, 616 tokens", "timing the normal model, 30 %", "outdated engine: x was moved. Same picture, normal speed; "
        + "build it again: it was made by another version, on another machine or for another GPU."].map(said);
    setLanguage("en");
    assert.deepEqual(read.slice(0, 5), ["已加速 2 个模型，共 3 个，11 次调用中有 9 次；约 4.6 s 按原速运行。 → 构建 1 个缺少的引擎", "已加速 3 个模型，共 3 个，速度约为不用引擎时的 2.3 倍",
        "canny: 4 次由 torch 运行，每次 8.9 ms, 2 次按原速，每次 40 ms (没有引擎)", "最多 4 张图像, 64 到 512 像素, 616 词元", "测量普通模型, 30 %"]);
    assert.equal(read[5], "引擎已过期: x was moved. 图像相同，速度为原速; 请重新构建：它由其他版本、在其他机器上或为其他 GPU 构建.");
});

test("a run that fails without a word is told by the kind of its error", () => {
    const failed = { node_type: "UNETLoader", exception_type: "AssertionError", exception_message: "\n" };
    assert.equal(runError(failed), "UNETLoader: AssertionError");
    assert.equal(runError({ ...failed, exception_message: "no such file\n" }), "UNETLoader: no such file");
});

test("a native call is never quiet", () => {
    assert.deepEqual(runWords({ engine: 8, native: 0, backend: "torch", reasons: [] }), { lines: ["Last run: 8 of 8 calls accelerated"], badge: "" });
    const part = describe({ state: "ready", engine: ENGINE, job: null, run: { engine: 5, native: 3, backend: "torch", reasons: [REASON] } });
    assert.equal(part.tone, "warn");
    assert.equal(part.badge, "partly accelerated");
    assert.equal(part.title, "Ready; last run partly accelerated");
    const unused = describe({ state: "ready", engine: ENGINE, job: null, run: { engine: 0, native: 3, backend: null, reasons: [REASON] } });
    assert.equal(unused.title, "Ready; last run not accelerated");
    assert.ok(part.lines.includes("Last run: 5 of 8 calls accelerated"));
    assert.ok(part.lines.some((line) => line.startsWith("3 × size the engine was not built for")));
    const none = runWords({ engine: 0, native: 4, backend: null, reasons: [REASON] });
    assert.deepEqual([none.badge, none.lines[0]], ["not accelerated", "Last run: not accelerated"]);
    assert.equal(runWords({ engine: 0, native: 4, reasons: [{ ...REASON, reason: "no engine" }] }).lines[1], "3 × no engine");
    assert.deepEqual(runWords(null), { lines: [], badge: "" });
});

test("a size that was not compiled for is told before the run and after it, with a build that adds it", () => {
    const engine = { ...ENGINE, backend: "torch", profile: "1024x1024, 77 tokens" };
    const ran = { engine: 8, native: 0, backend: "torch", reasons: [], uncompiled: [{ size: "832x1216, 154 tokens", graph: true, count: 8 }] };
    const after = describe({ state: "ready", engine, run: ran });
    assert.ok(after.lines.includes("Not compiled for 832x1216, 154 tokens: 8 calls ran uncompiled, and already faster"));
    assert.deepEqual([after.tone, after.badge, after.offer], ["warn", "not compiled", "Build for 832x1216, 154 tokens"]);
    const before = describe({ state: "ready", any_size: true, engine, run: null, uncompiled: { width: 832, height: 1216, images: 2 } });
    assert.equal(before.lines[0], "Not compiled for 832×1216, 2 images: already faster; build for full speed.");
    assert.deepEqual([before.tone, before.offer], ["warn", "Build for 832×1216, 2 images"]);
    const fine = describe({ state: "ready", engine, run: { ...ran, uncompiled: [] } });
    assert.deepEqual([fine.tone, fine.badge, fine.offer], ["good", "", ""]);
    const none = describe({ state: "none", run: ran });
    assert.equal(none.offer, "", "there the button itself builds it");
    assert.ok(runWords({ ...ran, uncompiled: [{ ...ran.uncompiled[0], graph: false }] }).lines[1].endsWith("8 calls ran uncompiled"));
});

test("a size that no engine is for is told before the run and after it, where engines are for one size each", () => {
    const engine = { ...ENGINE, backend: "tensorrt", profile: "batch 2, 512 px, 77 tokens" };
    const before = describe({ state: "ready", any_size: false, engine, run: null, uncompiled: { width: 832, height: 1216, images: 1 } });
    assert.equal(before.lines[0], "No engine for 832×1216: it runs at normal speed until that is built.");
    assert.deepEqual([before.tone, before.badge, before.offer], ["warn", "won't fit", "Build for 832×1216"]);
    const uncompiled = [{ size: "512x512, 154 tokens", graph: false, native: true, count: 4 }];
    const after = describe({ state: "ready", engine, run: { engine: 0, native: 4, backend: null, reasons: [REASON], uncompiled } });
    assert.deepEqual([after.badge, after.offer], ["not accelerated", "Build for 512x512, 154 tokens"]);
    assert.ok(!after.lines.some((line) => line.includes("ran uncompiled")), "the reason says that it ran at normal speed");
});

test("a picture that does not fit is told, and offered where a node may ask for it", () => {
    const misfit = { width: 512, height: 512, images: 64 };
    const shown = describe({ state: "none", misfit: { ...misfit, images: 65 }, widened: null });
    assert.match(shown.lines[0], /does not fit/);
    assert.deepEqual([shown.tone, shown.badge, shown.offer], ["warn", "won't fit", ""]);
    assert.equal(describe({ state: "none", misfit, widened: { max_images: 64 } }).offer, "Build for 512×512, 64 images");
});

test("each state has a title, a tone and a button", () => {
    const job = { id: "j", state: "running", phase: "exporting", percent: 35, seconds: 70, message: "" };
    const building = describe({ state: "building", job, run: null });
    assert.deepEqual([building.title, building.fraction, building.log], ["Building 35 %", 0.35, "j"]);
    assert.deepEqual(building.lines, ["exporting, 35 %, 1 min 10 s"]);
    const failed = describe({ state: "failed", text: "It broke.", job: { ...job, state: "failed" }, run: null });
    assert.deepEqual([failed.tone, failed.lines, failed.log], ["bad", ["It broke."], "j"]);
    assert.equal(describe({ state: "ready", engine: { ...ENGINE, covers: false }, run: null }).tone, "warn");
    const beyond = (any_size) => describe({ state: "ready", engine: { ...ENGINE, covers: false }, any_size, run: null }).lines[1];
    assert.match(beyond(false), /run at normal speed/);
    assert.match(beyond(true), /run uncompiled on torch/);
    for (const state of ["unknown", "unwired", "off", "none", "asked"]) assert.ok(describe({ state, run: null }).lines[0].length > 10);
    assert.deepEqual(["none", "building", "ready"].map(buttonLabel), ["Build engine", "Cancel build", "Build again"]);
});

test("what the next run will bring is said before it, with the time", () => {
    const said = (outlook, whenMissing = "use native", state = "none") =>
        describe({ state, whenMissing, run: null, outlook: { why: "", seconds: null, certain: state === "none", live: false, ...outlook } }).lines[0];
    assert.equal(said({ why: "lora", seconds: 231 }), "No engine yet for this model with these LoRAs and settings. Runs at normal speed for now. Building takes about 4 min.");
    assert.equal(said({ why: "lora", seconds: 231 }, "build now"), "No engine yet for this model with these LoRAs and settings. The next run builds it first: about 4 min.");
    assert.equal(said({ why: "checkpoint", seconds: 47 }, "build now", "unknown"),
        "No engine is known for this model yet. The next run builds it first if there is none: about 50 s.");
    assert.match(said({ why: "settings" }, "build in background", "unknown"), /starts the build \(minutes for a full-size model\)/);
    assert.match(said({ seconds: 70, live: true }), /torch without a build, with any LoRA\. A build \(about 70 s\)/);
    assert.match(said({ seconds: 70, live: true, why: "lora" }, "build now", "unknown"), /with any LoRA\. Only what was never built/);
    assert.equal(said({}), t("noneHint"));
    assert.equal(said({}, "use native", "unknown"), t("unknownHint"));
    const there = describe({ state: "unknown", there: true, run: null, outlook: { why: "", seconds: 60 } });
    assert.deepEqual([there.tone, there.title, there.lines], ["good", "Ready for the next run", [t("thereHint")]]);
    assert.equal(describe({ state: "none", run: null }).lines[0], t("noneHint"));
});

test("a model and the two networks of its VAE have lines of their own, known or not", () => {
    const of = (input, label = "sd.safetensors") => ({ state: "none", id: "1", input, label, run: null });
    const lines = (...uses) => describe({ ...uses[0], others: uses.slice(1) }).lines.slice(1, 4);
    const own = ["sd: No engine", "VAE decode: sd: No engine", "VAE encode: sd: No engine"];
    assert.deepEqual(lines(of("model"), of("vae"), of("vae:encode")), own);
    assert.deepEqual(lines(of("model"), of("vae", "VAE decode: sd.safetensors"), of("vae:encode", "VAE encode: sd.safetensors")), own);
    assert.deepEqual(lines(of("model", ""), of("vae", "")), ["Model: No engine", "VAE decode: No engine"]);
});

test("a refused prompt is told by its first node's error", () => {
    const errors = { 4: { class_type: "CheckpointLoaderSimple", errors: [{ message: "Value not in list", details: "ckpt_name: 'x'" }] } };
    assert.equal(promptError({ node_errors: errors }), "CheckpointLoaderSimple: Value not in list: ckpt_name: 'x'.");
    assert.equal(promptError({ error: { message: "No prompt" } }), "No prompt");
    const gone = { type: "value_not_in_list", message: "Value not in list", extra_info: { input_name: "ckpt_name", received_value: "x.ckpt" } };
    const missing = { node_errors: { 4: { class_type: "CheckpointLoaderSimple", errors: [gone] } } };
    assert.equal(promptError(missing, (id) => id === "4" && "Load Checkpoint"), "Missing file x.ckpt: choose or download it in Load Checkpoint.");
    assert.ok(promptError({}).includes("log"));
});

test("of a prompt that is refused in part, each node is told what is wrong with it or above it", () => {
    const node = (...above) => ({ inputs: Object.fromEntries(above.map((id) => [id, [id, 0]])) });
    const prompt = { 1: node(), 2: node("1"), 3: node(), 4: node("3") };
    const wrong = (message) => ({ class_type: "Loader", errors: [{ message, details: "" }] });
    const answer = { prompt_id: "p", node_errors: { 1: wrong("gone"), 4: wrong("too large") } };
    assert.equal(refusal(prompt, ["2"], answer), "Loader: gone.");
    assert.equal(refusal(prompt, ["4"], answer), "Loader: too large.");
    for (const fine of [{ node_errors: {} }, { node_errors: [] }, {}]) assert.equal(refusal(prompt, ["2"], fine), "");
    assert.equal(refusal(prompt, ["3"], answer), "");
    assert.equal(refusal(prompt, undefined, answer), "");
});

test("settings fill new nodes with values that their widgets offer", () => {
    const widgets = [
        { name: "backend", value: "auto", options: { values: ["auto", "torch"] } },
        { name: "precision", value: "auto", options: { values: ["auto"] } },
        { name: "max_size", value: 512 },
    ];
    defaultsFor({ widgets }, (id) => ({ "HybridTRT.Backend": "torch", "HybridTRT.Precision": "float8" })[id]);
    assert.deepEqual(widgets.map((w) => w.value), ["torch", "auto", 512]);
    offer([{ key: "presetSdxl", family: "SDXL", sizes: { min_size: 640, opt_size: 1024, max_size: 1536, max_images: 1, max_tokens: 231 } }]);
    defaultsFor({ widgets }, (id) => ({ "HybridTRT.Sizes": "presetSdxl" })[id]);
    assert.deepEqual(widgets.map((w) => w.value), ["torch", "auto", 1536]);
});

test("the settings offer the backends that the server names", () => {
    const names = ["auto", "torch", "another"];
    assert.deepEqual(settings(names).find(({ id }) => id === "HybridTRT.Backend").options, names);
});

test("a native call makes a report amber, and a report of nothing is neither good nor bad", () => {
    assert.deepEqual([{ native: [true] }, { native: [false] }, {}].map(toneOf), ["warn", "good", "idle"]);
});
