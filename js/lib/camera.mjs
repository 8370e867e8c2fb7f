// A webcam or a screen as frames of one size.

import { t } from "./texts.mjs";

/** Milliseconds after which a picture that does not change is sent again, so that changed settings are seen. */
const AGAIN = 200;
const QUALITY = 0.9;

export class Camera {
    constructor() {
        [this.video, this.preview] = [0, 1].map(() => Object.assign(document.createElement("video"), { muted: true, playsInline: true }));
        this.canvas = document.createElement("canvas");
        this.seen = [-1, -AGAIN]; // the video's time and ours, at the last frame
    }

    /**
     * Ask for a webcam or a screen and show it in `preview`; `video` is on no page, so that it never pauses.
     * @param {"webcam" | "screen"} kind
     * @param {() => void} ended is called when the user or the system takes it away
     * @throws {Error} with a sentence
     */
    async open(kind, ended) {
        const devices = navigator.mediaDevices;
        if (!devices) throw new Error(t("liveInsecure"));
        try {
            this.stream = await (kind === "screen" ? devices.getDisplayMedia({ video: true })
                : devices.getUserMedia({ video: { width: { ideal: 1280 }, frameRate: { ideal: 60 } } }));
        } catch (failure) {
            throw new Error(t("liveNoCamera", { why: failure.message }));
        }
        this.stream.getVideoTracks()[0].addEventListener("ended", ended);
        this.video.srcObject = this.preview.srcObject = this.stream;
        await Promise.all([this.video.play(), this.preview.play()]);
    }

    close() {
        for (const track of this.stream?.getTracks() ?? []) track.stop();
        this.stream = this.video.srcObject = this.preview.srcObject = null;
    }

    /** Whether there is something new to send. */
    get fresh() {
        const [time, when] = this.seen;
        return this.video.readyState >= 2 && (this.video.currentTime !== time || performance.now() - when > AGAIN);
    }

    /**
     * The middle of what is seen, as JPEG.
     * @param {number} width
     * @param {number} height
     * @returns {Promise<ArrayBuffer | undefined>}
     */
    async frame(width, height) {
        const { video, canvas } = this, { videoWidth: w, videoHeight: h } = video;
        this.seen = [video.currentTime, performance.now()];
        Object.assign(canvas, { width, height });
        const scale = Math.min(w / width, h / height), cut = [width * scale, height * scale];
        canvas.getContext("2d").drawImage(video, (w - cut[0]) / 2, (h - cut[1]) / 2, ...cut, 0, 0, width, height);
        const packed = await new Promise((done) => canvas.toBlob(done, "image/jpeg", QUALITY));
        return packed?.arrayBuffer();
    }
}
