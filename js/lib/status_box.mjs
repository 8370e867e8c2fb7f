// The box in which a node says how things stand: a headline, what has room, and the rest under "Details". It is as high as what
// it says, up to a limit, and its node grows and shrinks with it.

import { make, part } from "./dom.mjs";
import { said } from "./server_zh.mjs";
import { t } from "./texts.mjs";

const MARGIN = 6, LEAST = 80, MOST = 156; // templates keep room for no more
const STEP = 10; // letters by which a line is cut

export class StatusBox {
    /**
     * @param {any} node
     * @param {string} name the widget's, which is in no saved workflow and no prompt
     * @param {string} type
     */
    constructor(node, name, type) {
        this.node = node;
        this.height = LEAST;
        this.element = make("div", "hybrid-trt-status");
        this.content = part(this.element, "div", "hybrid-trt-content");
        this.head = part(this.content, "div", "hybrid-trt-head");
        this.title = part(this.head, "span", "hybrid-trt-title");
        this.lines = part(this.content, "div", "hybrid-trt-lines");
        this.actions = part(this.content, "div", "hybrid-trt-actions");
        this.details = part(this.content, "details", "hybrid-trt-details");
        this.summary = part(this.details, "summary", "");
        this.rest = part(this.details, "div", "hybrid-trt-lines");
        this.widget = node.addDOMWidget(name, type, this.element, {
            serialize: false, hideOnZoom: false, hideInPanel: true, margin: MARGIN,
            getMinHeight: () => this.height + 2 * MARGIN, getValue: () => this.title.textContent, setValue: () => {},
        });
        this.widget.serialize = false;
        // some of the page's panels write the width of their own column into every widget that they show
        Object.defineProperty(this.widget, "width", { configurable: true, get: () => undefined, set: () => {} });
        new ResizeObserver(() => this.#fit()).observe(this.content);
        new ResizeObserver(() => this.#fold()).observe(this.element);
    }

    /**
     * @param {string} tone good, busy, warn, bad or idle
     * @param {string} title
     * @param {string[]} lines
     * @param {string} [hint] what the pointer over the lines tells
     */
    show(tone, title, lines, hint = "") {
        this.element.dataset.tone = tone;
        this.title.textContent = said(title);
        this.lines.title = hint;
        this.summary.textContent = t("details");
        this.texts = lines.map(said);
        this.#fold();
        this.node.setDirtyCanvas?.(true, true);
    }

    /** Show the lines that have room. A node that somebody made higher than its text has more; Vue nodes grow with it. */
    #fold() {
        if (!this.texts || this.details.open) return;
        const room = Math.max(MOST, globalThis.LiteGraph?.vueNodesMode ? 0 : this.element.clientHeight);
        fold(this.texts, (shown, rest) => {
            this.lines.replaceChildren(...shown.map(row));
            this.rest.replaceChildren(...rest.map(row));
            this.details.hidden = !rest.length;
            return this.content.offsetHeight <= room; // 0 where it is not drawn
        });
    }

    /** Take the height that the content needs. Vue nodes do so by themselves. */
    #fit() {
        const needed = this.content.offsetHeight;
        const height = Math.min(Math.max(needed, LEAST), MOST);
        if (!needed || height === this.height) return; // what is not drawn has no height
        const before = this.node.computeSize()[1];
        this.height = height;
        const least = this.node.computeSize()[1], now = this.node.size[1];
        if (globalThis.LiteGraph?.vueNodesMode) return;
        // a node that somebody made higher keeps its height
        if (now <= before + 1 || now < least) this.node.setSize([this.node.size[0], least]);
        this.node.setDirtyCanvas?.(true, true);
    }
}

/** The start of a text, cut between words. */
function start(text, letters) {
    const kept = text.slice(0, letters), space = kept.lastIndexOf(" ");
    return `${kept.slice(0, space > letters / 2 ? space : letters).trimEnd()} …`;
}

/**
 * Draw the lines that have room, and fold the rest. A line is cut only where it is the first and has no room alone.
 * @param {string[]} lines
 * @param {(shown: string[], rest: string[]) => boolean} draw draws, and tells whether that has room
 */
export function fold(lines, draw) {
    for (let count = lines.length; count > 0; count -= 1) if (draw(lines.slice(0, count), lines.slice(count))) return;
    for (let letters = (lines[0]?.length ?? 0) - STEP; letters > STEP; letters -= STEP)
        if (draw([start(lines[0], letters)], lines)) return;
    if (!lines.length) draw([], []);
}

const row = (text) => make("div", "", text);
