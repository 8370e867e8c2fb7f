// What an engine node shows below its settings: the button and a status with bar, text and "show log".

import { badge, drawBadges } from "./badges.mjs";
import { part } from "./dom.mjs";
import { isWiredLater } from "./graph.mjs";
import { StatusBox } from "./status_box.mjs";
import { t } from "./texts.mjs";
import { BUSY, buttonLabel, describe, lacksSizes, switchedOff } from "./words.mjs";

export class NodeView {
    /**
     * @param {any} node
     * @param {{press: (view: NodeView) => void, buildFor: (view: NodeView) => void, showLog: (job: string) => void,
     *     sizes: import("./picture_sizes.mjs").PictureSizes}} actions
     */
    constructor(node, actions) {
        this.node = node;
        this.actions = actions;
        this.state = { state: "unknown", build_helps: true };
        this.key = "";
        this.badge = "";
        this.note = ""; // what is wrong with the node's own settings
        this.button = node.addWidget("button", "build_engine", null, () => actions.press(this), { serialize: false });
        this.button.serialize = false;
        this.box = new StatusBox(node, "engine_status", "hybrid_trt_status");
        this.chip = part(this.box.head, "span", "hybrid-trt-badge");
        this.bar = part(part(this.box.head, "div", "hybrid-trt-bar"), "div", "");
        this.box.head.after(this.bar.parentElement);
        this.offer = part(this.box.actions, "button", "hybrid-trt-log hybrid-trt-offer");
        this.offer.addEventListener("click", () => actions.buildFor(this));
        this.log = part(this.box.actions, "button", "hybrid-trt-log");
        this.log.addEventListener("click", () => this.view.log && actions.showLog(this.view.log));
        if (window.LGraphBadge) node.badges?.push(() => this.#badge()); // the box has the same word
        this.show(this.state);
    }

    get busy() {
        return BUSY.includes(this.state.state);
    }

    /** Show a state, see `describe`. */
    show(state) {
        this.state = state;
        this.key = state.key ?? this.key;
        const connected = (this.node.outputs ?? []).some(({ links }) => links?.length);
        this.view = describe({ ...state, connected, ...(state.state === "off" && switchedOff(this.node)), note: this.note });
        this.actions.sizes.know(state.sizes, state.outside);
        const unwired = state.state === "unwired" && !isWiredLater(this.node.graph);
        const known = unwired || state.state !== "unwired" ? state.state : "unknown";
        this.button.label = buttonLabel(lacksSizes(state) ? "none" : known); // what it has is not built again
        this.button.disabled = unwired;
        this.box.element.dataset.state = state.state;
        this.chip.textContent = this.view.badge;
        this.chip.hidden = !this.view.badge;
        this.bar.style.width = `${100 * (this.view.fraction ?? 0)}%`;
        this.bar.parentElement.hidden = this.view.fraction === null;
        this.log.textContent = t("log");
        this.log.hidden = this.view.log === null;
        this.offer.textContent = this.view.offer;
        this.offer.hidden = !this.view.offer;
        this.box.actions.hidden = this.log.hidden && this.offer.hidden;
        this.node.progress = this.view.fraction === null ? undefined : Math.max(this.view.fraction, 0.01);
        if (this.badge !== this.view.badge) {
            this.badge = this.view.badge;
            this.button.value = this.badge;
            drawBadges(this.node);
        }
        this.box.show(this.view.tone, this.view.title, this.view.lines, this.view.hint);
    }

    /** Say first what is wrong with the node's settings, or nothing of that any more. */
    say(note) {
        if (note === this.note) return;
        this.note = note;
        this.show(this.state);
    }

    /** Vue nodes ask again when what the badge read has changed: widgets' values they watch, fields of ours they do not. */
    #badge() {
        const { value } = this.button;
        return badge(value ? `TRT: ${value}` : "", "#201500", "#f0b13c");
    }
}
