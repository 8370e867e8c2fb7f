// What a node's state reads like: pure functions from the server's answers to words and tones.

import { BYPASSED, MUTED } from "./look.mjs";
import { t } from "./texts.mjs";

/** @typedef {{tone: string, title: string, lines: string[], fraction: number | null, badge: string, log: string | null, offer: string, hint: string}} View */

/** The tones of states of nodes, engines and builds, and signs beside their words: no colour tells a state alone. */
const STATES = {
    ready: ["good", "✓"], done: ["good", "✓"], running: ["busy", "▶"], queued: ["busy", "…"], building: ["busy"], asked: ["busy"],
    stale: ["warn", "!"], unchecked: ["warn", "?"], unavailable: ["warn"], broken: ["bad", "✕"], failed: ["bad", "✕"],
};
export const BUSY = ["asked", "queued", "building"];

/** The tone of a node, an engine or a build in a state. */
export const tone = (state) => STATES[state]?.[0] ?? "idle";

/** The words of an engine's or a build's state, behind its sign. */
export const marked = (state, words = t(state)) => `${STATES[state]?.[1] ?? ""} ${words}`.trim();

/** Whether a node that has not run yet has its engine in the library; null is for what only a run tells. */
export const isThere = ({ state, there }) => state === "unknown" && there === true;

/** A number of bytes as people say it. */
export function size(bytes) {
    if (!(bytes >= 0)) return "?";
    return bytes >= 1e8 ? `${(bytes / 1e9).toFixed(1)} GB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** From so many seconds on, people want to know beforehand. */
const NOTICED = 2;

/** Seconds as people say them. */
export function duration(seconds) {
    if (!(seconds >= 0)) return "?";
    const whole = Math.floor(seconds);
    return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** A relative error as a share, with two digits. */
export function error(value) {
    if (typeof value !== "number") return "?";
    return value < 1e-5 ? "< 0.001 %" : `${Number((100 * value).toPrecision(2))} %`;
}

/** An engine's relative error, beside the normal model's own where that is known. */
export function errorOf(engine) {
    const words = { error: error(engine.rel_err), native: error(engine.native_rel_err) };
    return engine.native_rel_err == null ? words.error : t("errorBeside", words);
}

/** What an engine takes, and that it was compared with native, in one line. */
export function engineLine(engine) {
    const speed = engine.speed && t(engine.speed < 1 ? "slower" : "faster", { times: engine.speed.toFixed(1) });
    const refit = engine.refit_s >= NOTICED && t("refit", { time: duration(engine.refit_s) });
    return [engine.profile, engine.rel_err != null && t("checked"), speed, refit].filter(Boolean).join(", ");
}

/** Who runs an engine, and how large it is, in one line. */
export function makeLine(engine) {
    return [engine.backend, engine.precision, size(engine.bytes)].join(", ");
}

/** How long a build has been running, and how long builds like it took; nothing of that once it takes longer. */
export function elapsed(job) {
    if (!(job.expected > job.seconds)) return duration(job.seconds);
    return t("ofAbout", { elapsed: duration(job.seconds), expected: duration(job.expected) });
}

/** A running build in one line: phase, percent, time. */
export function jobLine(job) {
    return job.state === "queued" ? job.phase : `${job.phase}, ${job.percent} %, ${elapsed(job)}`;
}

/**
 * What ran last, in lines, and the badge that a native call earns.
 * @param {{engine: number, native: number, backend: string | null, reasons: {count: number, text: string, advice: string}[]} | null} run
 */
export function runWords(run) {
    if (!run || run.engine + run.native === 0) return { lines: [], badge: "" };
    const all = run.engine + run.native;
    const uncompiled = (run.uncompiled ?? []).filter((calls) => !calls.native).map((calls) => t(calls.graph ? "ranGraph" : "ranPlainly", calls));
    const head = run.engine === 0 ? t("native") : t("ran", { engine: run.engine, all });
    if (run.native === 0) return { lines: [head, ...uncompiled], badge: "" };
    const reasons = run.reasons.map((r) => `${r.count} × ${r.reason === "no engine" ? r.reason : `${r.text} → ${r.advice}`}`);
    return { lines: [head, ...reasons, ...uncompiled], badge: t(run.engine === 0 ? "badge" : "badgePart") };
}

/** A time that nobody has measured here to the second. */
export function about(seconds) {
    if (!(seconds > 0)) return t("someTime");
    return seconds < 90 ? t("aboutSeconds", { count: Math.max(10, 10 * Math.round(seconds / 10)) })
        : t("aboutMinutes", { count: Math.round(seconds / 60) });
}

/** What a node does without an engine: auto builds one meanwhile where the server says so. */
export function meaning(whenMissing, { by_itself: byItself }) {
    return whenMissing !== "auto" ? whenMissing : byItself ? "build in background" : "use native";
}

const SOON = { "build now": "soonNow", "build in background": "soonBackground" };
const WHY = { lora: "whyLora", checkpoint: "whyCheckpoint", settings: "whySettings" };

/**
 * What the next run will bring for a node without an engine, with the time that a build takes.
 * @param {{outlook?: {why: string, seconds: number | null, certain: boolean, live: boolean}, whenMissing?: string}} state
 * @returns {string} empty when there is nothing to say
 */
export function outlookWords({ outlook, whenMissing }) {
    if (!outlook) return "";
    const time = about(outlook.seconds);
    if (outlook.live) return t({ "build now": "soonLiveNow", "build in background": "soonLiveBackground" }[whenMissing] ?? "soonLive", { time });
    const plain = !(whenMissing in SOON) && !outlook.why;
    if (plain && !outlook.seconds) return "";
    const key = whenMissing === "build now" && !outlook.certain ? "soonNowPerhaps" : SOON[whenMissing] ?? "soonNative";
    return [WHY[outlook.why] && t(WHY[outlook.why]), t(key, { time })].filter(Boolean).join(" ");
}

/**
 * Everything that a node shows; for TRT Accelerate that is how its worst network stands, and a line for each.
 * @param {any} state the server's answer for the node, or {state: "off" | "unwired" | "asked"}
 * @returns {View}
 */
export function describe(state) {
    const view = ofOne(state), networks = networkLines(state);
    const first = state.state === "ready" ? 0 : 1; // what is amiss comes first
    return { ...view, lines: [...view.lines.slice(0, first), ...networks, ...view.lines.slice(first)] };
}

function ofOne(state) {
    const { lines: ran, badge } = runWords(BUSY.includes(state.state) ? null : state.run);
    const view = { tone: state.tone ?? tone(state.state), title: t(state.state), lines: [], fraction: null, badge, log: null, offer: "", hint: "" };
    if (BUSY.includes(state.state)) {
        view.fraction = state.job ? state.job.percent / 100 : 0;
        view.lines = [state.job ? jobLine(state.job) : t("askedHint")];
        if (state.state === "building" && state.job) view.title = `${view.title} ${state.job.percent} %`;
        view.log = state.state === "building" ? state.job.id : null;
        return view;
    }
    if (state.state === "ready") {
        if (state.engine.rel_err != null) view.hint = t("checkedHint", { error: errorOf(state.engine) });
        view.lines = [engineLine(state.engine), ...(state.engine.covers ? [] : [t(state.any_size ? "smallerLive" : "smaller")])];
        if (!state.engine.covers) view.tone = "warn";
        else if (!ran.length) view.title = t("readyNext");
        if (state.job?.state === "failed") {
            view.lines.unshift(state.job.message);
            Object.assign(view, { title: t("readyOlder"), tone: "warn" });
        }
        if (state.connected === false) {
            view.lines.unshift(t("notConnectedHint"));
            Object.assign(view, { title: t("notConnected"), tone: "warn" });
        }
    } else if (isThere(state)) {
        Object.assign(view, { title: t("readyNext"), tone: "good", lines: [t("thereHint")] });
    } else {
        const outlook = ["none", "unknown"].includes(state.state) ? outlookWords(state) : "";
        view.lines = [outlook || (state.state === "none" || !state.text ? t(`${state.state}Hint`) : state.text)];
        if (state.state === "none" && state.job?.state === "cancelled") view.lines.unshift(t("cancelled"));
    }
    if (state.job?.state === "failed") view.log = state.job.id;
    if (state.misfit) {
        const words = { size: pixels(state.misfit), images: state.misfit.images };
        view.lines.unshift(t(misfitKey(state), words));
        if (state.widened) view.offer = t("buildFor", words);
        view.tone = view.tone === "bad" ? "bad" : "warn";
        view.badge ||= t("badgeMisfit");
    }
    if (lacksSizes(state)) {
        const wanted = state.uncompiled ? pixels(state.uncompiled) : state.run.uncompiled[0].size;
        if (state.uncompiled) view.lines.unshift(t(uncompiledKey(state), { size: wanted }));
        view.offer = t("buildFor", { size: wanted });
        view.tone = view.tone === "bad" ? "bad" : "warn";
        view.badge ||= t(state.uncompiled && !state.any_size ? "badgeMisfit" : "badgeUncompiled");
    }
    if (badge) view.tone = view.tone === "bad" ? "bad" : "warn";
    if (badge && view.title === t("ready")) view.title = t("readyBut", { badge });
    view.lines = [...view.lines, ...ran, ...(state.state === "ready" ? [makeLine(state.engine)] : [])];
    if (state.note) {
        view.lines.unshift(state.note);
        view.tone = "bad";
    }
    return view;
}

/** What becomes of a picture that does not fit: the next run builds for it where the node's own sizes hold it. */
function misfitKey({ state, engine, widened, whenMissing }) {
    if (state !== "ready") return "misfitSettings";
    const builds = engine.covers === false && widened && !Object.keys(widened).length;
    return (builds && { "build now": "misfitBuilds", "build in background": "misfitStarts" }[whenMissing]) || "misfit";
}

/** What becomes of a picture for whose size there is no file. */
function uncompiledKey({ any_size: anySize, whenMissing }) {
    return { "build now": "sizeBuilds", "build in background": "sizeStarts" }[whenMissing] ?? (anySize ? "uncompiled" : "noneOfSize");
}

/** A line for each network of TRT Accelerate: its file, and how it stands. Empty for a node with one network. */
function networkLines({ others = [], ...state }) {
    const networks = [state, ...others].filter(({ id }) => id === state.id).sort((a, b) => order(a) - order(b));
    return networks.length < 2 ? [] : networks.map((one) => `${nameOf(one)}: ${ofOne(one).title}`);
}

/** A model's file without its ending. */
export function shortName(label) {
    return label.replace(/\.(safetensors|ckpt|pth?|bin|gguf)$/, "");
}

function nameOf({ label, input }) {
    const vae = { vae: t("vae_decoder"), "vae:encode": t("vae_encoder") }[input];
    if (!label) return vae ?? t(input === "model" ? "unet" : "controlnet");
    return `${vae && !label.includes(": ") ? `${vae}: ` : ""}${shortName(label)}`; // once it has run, its label says it
}

/** The model comes first, then the ControlNets by number. */
const order = ({ input = "" }) => (input === "model" ? 0 : Number(/\d+$/.exec(input)?.[0] ?? 0));

/** A latent's size as people say it, with the batch when it is one. */
export function pixels({ width, height, images }) {
    return `${width}×${height}${images > 1 ? `, ${imageCount(images)}` : ""}`;
}

/** A number of images in words. */
export function imageCount(count) {
    return t(count === 1 ? "oneImage" : "images", { count });
}

/** Whether a node's engine was compiled for other sizes than the graph asks for, or the last run did. */
export function lacksSizes({ state, uncompiled, run }) {
    return state === "ready" && Boolean(uncompiled || run?.uncompiled?.length);
}

/** The button's text in a state. */
export function buttonLabel(state) {
    return t(BUSY.includes(state) ? "cancel" : { ready: "rebuild", unchecked: "check", unwired: "buildUnwired" }[state] ?? "build");
}

/**
 * What becomes of the picture when an engine node is switched off, which depends on the nodes behind it: what a muted or bypassed
 * engine node says; amber where more is lost than speed.
 * @param {any} node
 * @returns {{text: string, tone: string}}
 */
export function switchedOff(node) {
    if (![MUTED, BYPASSED].includes(node.mode)) return { text: t("offInside"), tone: "idle" };
    const muted = { TRTControlNetEngine: "offMuted", TRTAccelerate: "offRefused", TRTVAEEngine: "offRefused" }[node.comfyClass];
    if (muted && node.mode === MUTED) return { text: t(muted), tone: "warn" };
    return { text: t("offHint"), tone: "idle" };
}

/** Begins lines of a build's log that ComfyUI writes in every process that starts. */
const NOISE = [
    /^Found comfy_kitchen backend /, /^Checkpoint files will /, /^Total VRAM /, /^pytorch version:/i, /^Set vram state to:/, /^Device: /,
    /^Using .*attention/, /^(xformers|triton) version:/i, /^Enabled? .*(fp16 accumulation|pinned memory)/i, /^Could not enable /,
    /^(Python|ComfyUI( frontend)?) version:/i, /^VAE dtype/, /^Using async weight offloading/, /^aimdo/i,
];

/** A build's log as people read it, and in the end why it failed, unless the log says that already. */
export function logLines(log, message = "") {
    const lines = log.filter((line) => !NOISE.some((noise) => noise.test(line)));
    return !message || lines.at(-1)?.includes(message) ? lines : [...lines, "", message];
}
