import assert from "node:assert/strict";
import { test } from "node:test";
import { latentsFor, limitsOf, misfit, misfitOf, uncompiledOf, widened } from "../../js/lib/fit.mjs";
import { meant } from "../../js/lib/presets.mjs";
import { describe } from "../../js/lib/words.mjs";

const engine = (more = {}) => ({ class_type: "TRTUNetEngine", inputs: { model: ["1", 0], min_size: 256, opt_size: 512, max_size: 768, max_images: 2, backend: "auto", ...more } });
const graph = (latent, more = {}) => ({
    1: { class_type: "CheckpointLoaderSimple", inputs: { ckpt_name: "a" } },
    2: engine(),
    3: { class_type: "TRTSamplerPatch", inputs: { model: ["1", 0], engine: ["2", 0] } },
    4: { class_type: "KSampler", inputs: { model: ["3", 0], latent_image: ["5", 0], cfg: 7 } },
    5: { class_type: "EmptyLatentImage", inputs: latent },
    ...more,
});
const size = (width, height, batch_size = 1) => ({ width, height, batch_size });

test("the size that reaches the sampler is compared with the node's settings", () => {
    const none = { state: "none" };
    assert.equal(misfitOf(graph(size(512, 768)), "2", none), null);
    assert.deepEqual(misfitOf(graph(size(512, 1024)), "2", none), { width: 512, height: 1024, images: 1, cfg: 7 });
    assert.equal(misfitOf(graph(size(512, 128)), "2", none).height, 128);
    assert.equal(misfitOf(graph(size(512, 512, 3)), "2", none).images, 3);
});

test("an engine that is there decides, and a torch engine takes every size", () => {
    const ready = { state: "ready", engine: { backend: "onnxruntime", limits: { min: 256, max: 1024, images: 2 } } };
    assert.equal(misfitOf(graph(size(512, 1024)), "2", ready), null);
    assert.equal(misfitOf(graph(size(512, 1088)), "2", ready).height, 1088);
    assert.equal(limitsOf({ state: "ready", engine: { backend: "torch" } }, engine().inputs), null);
    assert.equal(limitsOf({ state: "none" }, engine({ backend: "torch" }).inputs), null);
    assert.equal(limitsOf({ state: "none", any_size: true }, engine().inputs), null, "auto took live weights");
    assert.equal(limitsOf({ ...ready, any_size: true }, engine().inputs), null, "live weights stand behind the engine");
});

test("without CFG twice the images fit, and where CFG is not known nothing is claimed", () => {
    const limits = { min: 64, max: 512, images: 2 };
    const images = (count, cfg) => misfit([{ width: 512, height: 512, images: count, cfg }], limits);
    assert.notEqual(images(3, 7), null);
    assert.equal(images(4, 1), null);
    assert.notEqual(images(5, 1), null);
    assert.equal(images(4, undefined), null);
});

test("what is not certain is not warned of", () => {
    const loaded = graph({}, { 5: { class_type: "VAEEncode", inputs: { pixels: ["9", 0] } } });
    assert.deepEqual(latentsFor(loaded, "2"), []);
    assert.deepEqual(latentsFor(graph({ width: ["8", 0], height: 512, batch_size: 1 }), "2"), [], "a linked size");
    assert.deepEqual(latentsFor({ 2: engine() }, "2"), [], "no sampler");
    assert.equal(misfitOf({}, "2", { state: "none" }), null);
});

test("a second sampler with another model is not blamed on the first one's engine", () => {
    const second = graph(size(512, 512), {
        6: { class_type: "KSampler", inputs: { model: ["1", 0], latent_image: ["7", 0], positive: ["8", 0], cfg: 7 } },
        7: { class_type: "EmptyLatentImage", inputs: size(2048, 2048) },
        8: { class_type: "ControlNetApplyAdvanced", inputs: { image: ["9", 0] } },
        9: { class_type: "VAEDecode", inputs: { samples: ["4", 0] } },
    });
    assert.equal(misfitOf(second, "2", { state: "none" }), null);
});

test("widening never narrows", () => {
    const now = { min_size: 256, opt_size: 512, max_size: 768, max_images: 4 };
    assert.deepEqual(widened({ width: 1024, height: 512, images: 1 }, now),
        { min_size: 256, max_size: 1024, max_images: 4 });
    assert.deepEqual(widened({ width: 128, height: 512, images: 8 }, now), { min_size: 128, max_size: 768, max_images: 8 });
});

test("what no node may ask for is told and not offered", () => {
    const now = { min_size: 256, opt_size: 512, max_size: 768, max_images: 4 }, batch = { width: 512, height: 512, images: 65 };
    assert.deepEqual(widened({ width: 9000, height: 8, images: 65 }, now), { min_size: 16, max_size: 8192, max_images: 64 });
    const shown = describe({ state: "none", misfit: batch });
    assert.match(shown.lines[0], /does not fit/);
    assert.deepEqual([shown.offer, describe({ state: "none", misfit: { ...batch, images: 64 } }).offer !== ""], ["", true]);
});

const SDXL = { family: "SDXL", min_size: 512, opt_size: 1024, max_size: 1536, max_images: 1, max_tokens: 231 };
const ZEROS = { min_size: 0, opt_size: 0, max_size: 0, max_images: 0, max_tokens: 0 };

test("zeros are what fits the model, and a number that contradicts that wins", () => {
    const { family, max_tokens, ...sizes } = SDXL;
    assert.deepEqual(meant(ZEROS, SDXL), sizes);
    assert.equal(meant(ZEROS, undefined), null);
    assert.deepEqual(meant({ ...ZEROS, max_size: 256 }, SDXL), { min_size: 256, opt_size: 256, max_size: 256, max_images: 1 });
    assert.deepEqual(meant({ ...ZEROS, min_size: 2048 }, SDXL), { min_size: 2048, opt_size: 2048, max_size: 2048, max_images: 1 });
    assert.deepEqual(meant({ ...ZEROS, opt_size: 320 }, SDXL), { ...sizes, min_size: 320, opt_size: 320 });
});

test("a size that does not fit the model's own sizes is told and widens only what has to be wider", () => {
    const asks = (width, height, images, state) => misfitOf(graph({ width, height, batch_size: images }, { 2: engine(ZEROS) }), "2",
        { state: "none", fits: SDXL, ...state });
    assert.equal(asks(832, 1216, 1), null);
    assert.notEqual(asks(832, 1216, 2), null);
    assert.notEqual(asks(2048, 1024, 1), null);
    assert.equal(asks(2048, 1024, 1, { fits: undefined }), null, "nothing is certain yet");
    assert.equal(asks(2048, 1024, 1, { any_size: true }), null, "the torch backend serves every size");
    assert.deepEqual(widened({ width: 2048, height: 1024, images: 1 }, ZEROS, SDXL), { min_size: 0, max_size: 2048, max_images: 0 });
    assert.deepEqual(widened({ width: 832, height: 1216, images: 4 }, ZEROS, SDXL), { min_size: 0, max_size: 0, max_images: 4 });
});

test("a picture that an engine of compiled sizes has no file for is told, whatever its prompt's length", () => {
    const compiled = (...sizes) => ({ state: "ready", engine: { backend: "torch", compiled: sizes.map(([width, height, batch]) => ({ width, height, batch })) } });
    const portrait = graph(size(832, 1216));
    assert.equal(uncompiledOf(portrait, "2", compiled([1024, 1024, 2], [832, 1216, 2])), null);
    assert.deepEqual(uncompiledOf(portrait, "2", compiled([1024, 1024, 2], [1216, 832, 2])), { width: 832, height: 1216, images: 1, cfg: 7 });
    assert.notEqual(uncompiledOf(portrait, "2", compiled([1024, 1216, 2], [832, 1024, 2])), null);
    assert.equal(uncompiledOf(portrait, "2", { ...compiled([64, 64, 2]), state: "stale" }), null, "it is built again as it is");
    assert.notEqual(uncompiledOf(portrait, "2", compiled([832, 1216, 1])), null, "with CFG a call has both prompts");
    assert.notEqual(uncompiledOf(graph(size(832, 1216, 2)), "2", compiled([832, 1216, 2])), null, "two images");
    assert.equal(uncompiledOf(graph(size(836, 1220)), "2", compiled([832, 1216, 2])), null, "a latent has an element for 8 pixels");
    assert.equal(uncompiledOf(portrait, "2", { state: "ready", engine: { backend: "onnxruntime", compiled: null } }), null);
    assert.equal(uncompiledOf(portrait, "2", { state: "none" }), null, "the button builds for it anyway");
});
