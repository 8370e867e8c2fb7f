// Settings of a live stream: sliders and texts that change it while it runs.

import { button, make } from "./dom.mjs";
import { t } from "./texts.mjs";

/** Milliseconds that a text rests before it is sent: each new prompt has to be encoded. */
const REST = 400;
const SLIDERS = { denoise: [0.01, 1, 0.01], steps: [1, 8, 1], cfg: [1, 10, 0.1] };
const SIDES = { min: 64, max: 2048, step: 8 };

export class LiveControls {
    /** @param {(message: Record<string, any>) => void} tell sends a change */
    constructor(tell) {
        this.tell = tell;
        this.element = make("div", "hybrid-trt-live-settings");
        this.size = make("div", "hybrid-trt-row");
        this.numbers = ["liveWidth", "liveHeight"].map((key) => {
            const input = Object.assign(make("input"), { type: "number", value: 512, ...SIDES });
            input.addEventListener("change", () => { input.value = side(input.value); });
            this.size.append(labelled(t(key), input));
            return input;
        });
    }

    /** Width and height of the frames. */
    get sides() {
        return this.numbers.map(({ value }) => side(value));
    }

    /** Whether the stream runs: nothing else hears of changes. */
    enable(running) {
        for (const part of this.element.querySelectorAll("input, textarea, button")) part.disabled = !running;
    }

    /** Show what may be changed on a stream, with its values. */
    show(settings) {
        const strengths = [...(settings.strengths ?? [])];
        const parts = strengths.map((value, i) => this.#slider(t("liveStrength", { number: i + 1 }), value, [0, 2, 0.01], (now) => {
            strengths[i] = now;
            this.tell({ strengths });
        }));
        for (const [name, range] of Object.entries(SLIDERS)) {
            if (name in settings) parts.push(this.#slider(t(`live_${name}`), settings[name], range, (now) => this.tell({ [name]: now })));
        }
        if ("seed" in settings) parts.push(this.#seed(settings.seed));
        for (const name of ["prompt", "negative"]) if (name in settings) parts.push(this.#text(name, settings[name]));
        if (!("prompt" in settings)) parts.push(make("div", "hybrid-trt-quiet", t("liveNoClip")));
        this.element.replaceChildren(...parts);
    }

    #slider(label, value, [min, max, step], change) {
        const input = Object.assign(make("input"), { type: "range", min, max, step }), shown = make("output", "", String(value));
        input.value = value;
        input.addEventListener("input", () => {
            shown.textContent = input.value;
            change(Number(input.value));
        });
        return labelled(label, input, shown);
    }

    #seed(value) {
        const input = Object.assign(make("input"), { type: "number", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, value });
        const change = () => Number.isSafeInteger(input.valueAsNumber) && this.tell({ seed: input.valueAsNumber });
        input.addEventListener("input", change);
        const another = button("liveAnother", () => {
            input.value = Math.floor(Math.random() * 2 ** 32);
            change();
        });
        return labelled(t("live_seed"), input, another);
    }

    #text(name, value) {
        const input = Object.assign(make("textarea"), { rows: 3, value, placeholder: t("livePrompt") });
        let timer;
        input.addEventListener("input", () => {
            clearTimeout(timer);
            timer = setTimeout(() => this.tell({ [name]: input.value }), REST);
        });
        const label = labelled(t(`live_${name}`), input);
        label.classList.add("hybrid-trt-live-text");
        return label;
    }
}

/** The allowed side of a frame that is nearest to a number. */
export function side(value) {
    const { min, max, step } = SIDES;
    return Math.min(max, Math.max(min, step * Math.round(Number(value) / step)));
}

/** An input with its name before it, and more behind. */
function labelled(text, input, ...more) {
    const label = make("label", "hybrid-trt-live-setting", make("span", "", text), input, ...more);
    input.setAttribute("aria-label", text); // what else is in the label is no part of its name
    return label;
}
