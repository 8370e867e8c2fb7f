// A live stream's connection: frames go out, pictures come back, and how fast they do.

import { isLink } from "./graph.mjs";
import { STREAM } from "./node_names.mjs";
import { request } from "./server.mjs";

/** Frames that are under way at most, besides the frames that the stream keeps: one in work, and one that waits. */
const UNDER_WAY = 2;
/** Milliseconds after which a frame without an answer counts as lost. */
const LOST = 3000;
const KEPT = 240;

/** Whether a prompt has a node that takes live frames. */
export function takesLive(prompt) {
    return Object.values(prompt).some(({ class_type: type, inputs }) => type === STREAM && !isLink(inputs.frames));
}

/** Which frames are under way, and how long the last ones took. Times are milliseconds. */
export class Pace {
    constructor() {
        this.kept = 0; // frames that the stream keeps in work
        this.sent = []; // number and time of frames without an answer
        this.count = 0;
        this.came = [];
        this.delays = [];
    }

    /** A frame goes out: its number. */
    send(now) {
        this.sent.push([this.count, now]);
        return this.count++;
    }

    /** A picture has come; frames before its own were dropped. */
    answer(number, now) {
        const own = this.sent.find(([one]) => one === number);
        this.sent = this.sent.filter(([one]) => one > number);
        if (own) this.delays = [...this.delays, now - own[1]].slice(-KEPT);
        this.came = [...this.came, now].slice(-KEPT);
    }

    /** Whether another frame may go out. */
    free(now) {
        this.sent = this.sent.filter(([, time]) => now - time < LOST);
        return this.sent.length < UNDER_WAY + this.kept;
    }

    /** Pictures a second over the last two, the times between pictures that half and 99 % keep, and the usual delay. */
    figures(now) {
        const between = this.came.slice(1).map((time, i) => time - this.came[i]), recent = this.came.filter((time) => now - time < 2000);
        const span = recent.length > 1 ? recent.at(-1) - recent[0] : 0;
        return { fps: span ? 1000 * (recent.length - 1) / span : 0, p50: quantile(between, 0.5), p99: quantile(between, 0.99), delay: quantile(this.delays, 0.5) };
    }
}

function quantile(values, part) {
    const sorted = [...values].sort((a, b) => a - b);
    return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] : 0;
}

/** A WebSocket to the stream that runs. */
export class LiveLink {
    /**
     * @param {any} api ComfyUI's api
     * @param {{ready: (settings: Record<string, any>) => void, picture: (data: Blob, number: number) => void,
     *     refused: (text: string) => void, ended: (text: string) => void, lost: () => void}} hears
     */
    constructor(api, hears) {
        this.api = api;
        this.hears = hears;
        this.pace = new Pace();
    }

    /** @throws {Error} no stream runs; the message is a sentence */
    async open() {
        const { token } = await request(this.api, "/live/token", { method: "POST" });
        const url = new URL(this.api.apiURL("/hybrid_trt/live"), location.href);
        url.protocol = url.protocol.endsWith("s:") ? "wss:" : "ws:";
        this.socket = new WebSocket(url);
        this.socket.binaryType = "arraybuffer";
        this.socket.onopen = () => this.socket.send(JSON.stringify({ token, format: "jpeg" }));
        this.socket.onmessage = ({ data }) => (typeof data === "string" ? this.#hear(JSON.parse(data)) : this.#take(data));
        this.socket.onclose = () => this.ready !== null && this.hears.lost();
        this.ready = false;
    }

    /** Say no more, and hear no more. */
    close() {
        this.ready = null;
        this.socket?.close();
    }

    /** Change settings from the next frame on, or stop. */
    tell(message) {
        if (this.ready) this.socket.send(JSON.stringify(message));
    }

    /** Whether a frame may go out now. */
    get free() {
        return Boolean(this.ready) && this.pace.free(performance.now());
    }

    /** @param {ArrayBuffer} frame JPEG or PNG */
    send(frame) {
        if (!this.ready) return;
        this.pace.send(performance.now());
        this.socket.send(frame);
    }

    #hear(message) {
        this.batch ??= message.steps_as_batch;
        const { steps } = message.ready ?? message.changed ?? {};
        if (this.batch && steps) this.pace.kept = steps - 1;
        if ("ready" in message) {
            this.ready = true;
            this.hears.ready(message.ready);
        }
        if ("error" in message && this.ready) this.hears.refused(message.error);
        if ("ended" in message || ("error" in message && !this.ready)) {
            this.close();
            this.hears.ended(message.ended ?? message.error);
        }
    }

    #take(data) {
        const number = new DataView(data).getUint32(0, true);
        this.pace.answer(number, performance.now());
        this.hears.picture(new Blob([data.slice(4)], { type: "image/jpeg" }), number);
    }
}
