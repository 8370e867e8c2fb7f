// What an engine node shows below its settings: the button and a status with bar, text and "show log".

import { t } from "./texts.mjs";
import { BUSY, buttonLabel, describe } from "./words.mjs";

const HEIGHT = 92;

export class NodeView {
    /**
     * @param {any} node
     * @param {{press: (view: NodeView) => void, buildFor: (view: NodeView) => void, showLog: (job: string) => void,
     *     fits: (sizes: any) => void}} actions
     */
    constructor(node, actions) {
        this.node = node;
        this.actions = actions;
        this.state = { state: "unknown" };
        this.key = "";
        this.badge = "";
        this.button = node.addWidget("button", "build_engine", null, () => actions.press(this), { serialize: false });
        this.button.serialize = false;
        this.element = document.createElement("div");
        this.element.className = "hybrid-trt-status";
        this.head = this.#add("div", "hybrid-trt-head");
        this.title = this.head.appendChild(this.#add("span", "hybrid-trt-title"));
        this.chip = this.head.appendChild(this.#add("span", "hybrid-trt-badge"));
        this.bar = this.#add("div", "hybrid-trt-bar").appendChild(document.createElement("div"));
        this.offer = this.#add("button", "hybrid-trt-log hybrid-trt-offer");
        this.offer.addEventListener("click", () => actions.buildFor(this));
        this.lines = this.#add("div", "hybrid-trt-lines");
        this.log = this.#add("button", "hybrid-trt-log");
        this.log.addEventListener("click", () => this.view.log && actions.showLog(this.view.log));
        this.widget = node.addDOMWidget("engine_status", "hybrid_trt_status", this.element, {
            serialize: false, hideOnZoom: false, getMinHeight: () => HEIGHT,
            getValue: () => this.title.textContent, setValue: () => {},
        });
        this.widget.serialize = false;
        node.badges?.push(() => this.#badge());
        this.show(this.state);
    }

    get busy() {
        return BUSY.includes(this.state.state);
    }

    /** Show a state, see `describe`. */
    show(state) {
        this.state = state;
        this.key = state.key ?? this.key;
        this.view = describe(state);
        if (state.fits) this.actions.fits(state.fits);
        this.button.label = buttonLabel(state.state);
        this.element.dataset.tone = this.view.tone;
        this.element.dataset.state = state.state;
        this.title.textContent = this.view.title;
        this.chip.textContent = this.view.badge;
        this.chip.hidden = !this.view.badge;
        this.bar.style.width = `${100 * (this.view.fraction ?? 0)}%`;
        this.bar.parentElement.hidden = this.view.fraction === null;
        this.lines.replaceChildren(...this.view.lines.map((line) => {
            const part = document.createElement("div");
            part.textContent = line;
            return part;
        }));
        this.log.textContent = t("log");
        this.log.hidden = this.view.log === null;
        this.offer.textContent = this.view.offer;
        this.offer.hidden = !this.view.offer;
        this.node.progress = this.view.fraction === null ? undefined : Math.max(this.view.fraction, 0.01);
        if (this.badge !== this.view.badge) {
            this.badge = this.view.badge;
            const badges = this.node.badges;
            this.node.graph?.trigger?.("node:property:changed", {
                type: "node:property:changed", nodeId: this.node.id, property: "badges", oldValue: badges, newValue: badges,
            });
        }
        this.node.setDirtyCanvas?.(true, true);
    }

    #badge() {
        return new window.LGraphBadge({ text: this.badge ? `TRT: ${this.badge}` : "", fgColor: "#201500", bgColor: "#f0b13c" });
    }

    #add(tag, name) {
        const part = document.createElement(tag);
        part.className = name;
        return this.element.appendChild(part);
    }
}
