// The live panel: a webcam or a screen goes in, pictures come out, and settings change while the stream runs.

import { Camera } from "./camera.mjs";
import { button, make } from "./dom.mjs";
import { LiveControls } from "./live_controls.mjs";
import { LiveLink, takesLive } from "./live_link.mjs";
import { LIVE } from "./panel_words.mjs";
import { said } from "./server_zh.mjs";
import { t } from "./texts.mjs";
import { jobLine } from "./words.mjs";

/** Milliseconds between two looks at the camera; half of what a frame of 60 a second takes. */
const LOOK = 8;
const TELL = 500;
/** Milliseconds from one try to connect again to the next, and how long a stream waits for frames. */
const RETRY = 1000, PATIENCE = 30_000;

export class Live {
    /**
     * @param {any} api ComfyUI's api
     * @param {{prompt: () => Promise<Record<string, any>>, queue: () => Promise<unknown>}} page the open workflow, and how to run it
     */
    constructor(api, page) {
        this.api = api;
        this.page = page;
        this.camera = new Camera();
        this.#draw();
        api.addEventListener("status", ({ detail }) => detail?.exec_info?.queue_remaining === 0 && this.#idle());
        api.addEventListener("hybrid_trt.build", ({ detail }) => this.queued && this.running && this.#say("busy", waitWords(detail)));
        api.addEventListener("hybrid_trt.live", ({ detail }) => detail.open && this.#opened());
    }

    /** Show the panel in a tab's element. What streams goes on while it is not shown. */
    open(element) {
        element.replaceChildren(this.element);
        if (this.camera.stream) this.camera.preview.play().catch(() => {}); // a video that leaves the page pauses
    }

    #draw() {
        this.element = make("div", "hybrid-trt-panel hybrid-trt-live");
        this.picture = make("canvas", "hybrid-trt-live-picture");
        this.picture.setAttribute("role", "img");
        this.picture.setAttribute("aria-label", t("livePicture"));
        this.pace = make("div", "hybrid-trt-live-pace");
        this.words = make("div", "hybrid-trt-live-words");
        this.words.setAttribute("role", "status");
        this.starts = [button("liveWebcam", () => this.start("webcam")), button("liveScreen", () => this.start("screen"))];
        this.stops = button("liveStop", () => this.stop());
        this.controls = new LiveControls((message) => this.link?.tell(message));
        const row = make("div", "hybrid-trt-row", ...this.starts, this.stops);
        this.element.append(row, this.controls.size, this.words, this.picture, this.pace, this.camera.preview, this.controls.element);
        this.#say("", t("liveHint"));
        this.#show(false);
    }

    /** Take frames from a webcam or a screen to the stream; the workflow is run if none waits for frames. */
    async start(kind) {
        this.#show(true);
        try {
            await this.camera.open(kind, () => this.stop());
            if (!this.running) return this.camera.close(); // stopped while the browser asked for leave
            this.#say("busy", t("liveStarting"));
            if (!await this.#connect()) await this.#queue();
        } catch (failure) {
            this.queued = false;
            this.#end(failure.message, "bad");
        }
    }

    /** End the stream: its node ends, now or when it begins, and the camera is off. */
    stop() {
        this.link?.tell({ stop: true });
        this.#end(t("liveStopped"));
    }

    /** @returns {Promise<boolean | null>} whether a stream runs that takes frames; null where the server does not answer */
    async #connect() {
        const link = new LiveLink(this.api, {
            ready: (settings) => this.#ready(settings), picture: (data, number) => this.#paint(data, number),
            refused: (text) => this.#say("warn", said(text)), ended: (text) => this.#end(said(text)), lost: () => this.#again(),
        });
        try {
            await link.open();
        } catch (failure) {
            return failure.status ? false : null;
        }
        this.link?.close();
        this.link = link;
        return true;
    }

    /** Run the workflow, unless it waits in the queue already. */
    async #queue() {
        if (this.queued) return;
        if (!takesLive(await this.page.prompt())) throw new Error(t("liveNoNode"));
        if (!this.running || this.queued) return; // stopped meanwhile, or started again
        this.queued = true; // until its stream opens
        if (await this.page.queue() === false) throw new Error(t("liveNotQueued"));
        const queue = await (await this.api.fetchApi("/queue")).json(); // it may have ended already
        if (!queue.queue_running.length && !queue.queue_pending.length) this.#idle();
    }

    /** A stream has begun. */
    #opened() {
        if (!this.queued) return;
        this.queued = false;
        this.#connect();
    }

    /** The queue is empty: if the workflow had to open a stream, there is none. */
    #idle() {
        if (this.queued && this.running) this.#end(t("liveNotRun"), "bad");
        this.queued = false;
    }

    #ready(settings) {
        if (!this.running) return this.stop(); // nobody waits for it any more
        this.controls.show(settings);
        this.#say("good", t("liveRuns"));
        this.loop ??= setInterval(() => this.#look(), LOOK);
        this.teller ??= setInterval(() => { this.pace.textContent = this.link ? t("livePace", rounded(this.link.pace.figures(performance.now()))) : ""; }, TELL);
    }

    async #look() {
        if (this.taking || !this.link?.free || !this.camera.fresh) return;
        this.taking = true;
        try {
            const frame = await this.camera.frame(...this.controls.sides);
            if (frame) this.link?.send(frame);
        } finally {
            this.taking = false;
        }
    }

    async #paint(data, number) {
        this.#look();
        const { link } = this, picture = await createImageBitmap(data);
        if (link !== this.link || number < link.painted) return; // a newer one was unpacked first
        link.painted = number;
        if (this.picture.width !== picture.width || this.picture.height !== picture.height)
            Object.assign(this.picture, { width: picture.width, height: picture.height });
        this.picture.getContext("2d").drawImage(picture, 0, 0);
        picture.close();
    }

    /** The connection is gone: try again for as long as the stream waits. */
    #again(until = performance.now() + PATIENCE) {
        this.#say("warn", t("liveLost"));
        this.link = null;
        setTimeout(async () => {
            if (!this.running || this.link) return; // stopped meanwhile, or started again
            const made = await this.#connect();
            if (made === null && this.running && performance.now() < until) this.#again(until);
            else if (this.running && !made) this.#end(t("liveGone"), "bad");
        }, RETRY);
    }

    #end(words, tone = "") {
        clearInterval(this.loop);
        clearInterval(this.teller);
        this.loop = this.teller = null;
        this.link?.close();
        this.link = null;
        this.camera.close();
        this.#show(false);
        this.#say(tone, words);
    }

    #show(running) {
        this.running = running;
        for (const start of this.starts) start.hidden = running;
        for (const part of [this.stops, this.camera.preview, this.pace]) part.hidden = !running;
        this.controls.enable(running);
    }

    #say(tone, words) {
        this.words.dataset.tone = tone;
        this.words.textContent = words;
    }
}

/** What a stream waits for that has not begun, after a build has changed. */
export const waitWords = (job) =>
    (LIVE.includes(job.state) ? t("liveBuilding", { words: said(jobLine(job)) }) : t("liveStarting"));

const rounded = ({ fps, ...times }) =>
    ({ fps: fps.toFixed(1), ...Object.fromEntries(Object.entries(times).map(([name, time]) => [name, Math.round(time)])) });
