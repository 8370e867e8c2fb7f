// The choice of picture sizes on an engine node: Auto, a family's usual formats, or numbers of one's own. It stands above the
// numbers that it sets and that prompts send. Auto keeps them right when the graph's picture changes, and is saved as zeros:
// the page would take what follows from the graph for edits, which undo takes back and Auto does again.

import { applyPreset, follow, presetName, presetOf, PRESETS, sameSizes, sizesOf } from "./presets.mjs";
import { t } from "./texts.mjs";
import { imageCount, pixels } from "./words.mjs";

const AUTO = "presetFit", CUSTOM = "custom";
/** The property of a node that says what its numbers alone do not: "presetFit" for Auto, or "custom". */
const CHOSEN = "picture_sizes";

export class PictureSizes {
    /**
     * @param {any} node
     * @param {() => void} changed called after the numbers were set
     * @param {(sizes: PictureSizes) => void} toAll gives this node's choice to the other nodes of its sampler
     * @param {Map<string, Record<string, number>>} followed Auto's numbers of all nodes, for nodes that the page makes anew
     */
    constructor(node, changed, toAll, followed = new Map()) {
        this.node = node;
        this.changed = changed;
        this.toAll = toAll;
        this.followed = followed;
        /** @type {{fits?: any, asked?: any, auto?: any, pictures?: any[]}} what the server last sent, see its `picture_fit` */
        this.sent = {};
        this.outside = {}; // numbers that a subgraph's node shows and sends in the place of the node's own
        this.widget = node.addWidget("combo", "size_preset", "", (value) => this.#picked(value), { values: [], serialize: false });
        Object.assign(this.widget, { serialize: false, label: t("presetLabel"), tooltip: t("presetHint") });
        this.widget.incrementValue = this.widget.decrementValue = (click) => openList(this.widget, click);
        const { widgets } = node, first = widgets.findIndex(({ name }) => name in PRESETS[AUTO]);
        widgets.splice(first, 0, widgets.pop());
        foldOnCanvas(node);
        for (const size of widgets.filter(({ name }) => name in PRESETS[AUTO])) follow(size, "callback", () => this.#typed());
        follow(node, "onConfigure", () => this.#loaded());
        follow(node, "onSerialize", (saved) => this.#save(saved));
        this.#loaded();
    }

    /** "presetFit" (Auto), another preset's key, or "custom". */
    get choice() {
        const kept = this.node.properties?.[CHOSEN];
        return kept === AUTO || kept === CUSTOM ? kept : presetOf(this.node) ?? CUSTOM;
    }

    /** The choice that fits what prompts send: numbers from outside the subgraph are of somebody's own. */
    get shown() {
        return Object.keys(this.outside).length ? CUSTOM : this.choice;
    }

    /**
     * Learn what the server sends on the node's sizes; Auto follows it once.
     * The page may change a number without calling its widget, so its value is looked at.
     * @param {Record<string, number>} outside see `numbersFromOutside`
     */
    know(sent = this.sent, outside = {}) {
        const before = JSON.stringify([this.sent, this.outside]), isNew = sent !== this.sent;
        this.sent = sent;
        this.outside = outside;
        if (!sameSizes(sizesOf(this.node), this.known)) this.#typed();
        else if (isNew && this.choice === AUTO && sent.auto) this.#follow(sent.auto);
        if (before === JSON.stringify([sent, outside])) return;
        this.#hide(Boolean(sent.every));
        this.#show();
    }

    /** Choose, as if it had been picked: a key as `choice` gives it, with the numbers of a choice of one's own. */
    choose(key, numbers = PRESETS[key]) {
        this.node.properties ??= {};
        if (key === AUTO || key === CUSTOM) this.node.properties[CHOSEN] = key;
        else delete this.node.properties[CHOSEN];
        this.#set(key === AUTO ? { ...numbers, ...this.sent.auto, max_tokens: 0 } : numbers ?? sizesOf(this.node));
        this.#show();
        this.changed();
    }

    /** The menu entries with all choices. */
    menu() {
        const options = this.#entries().map(([label, act]) => ({ content: label, callback: () => act() }));
        return { content: t("presets"), has_submenu: true, submenu: { options } };
    }

    /** @returns {[string, () => void][]} */
    #entries() {
        const { node } = this, custom = this.shown === CUSTOM;
        const unfold = node.showAdvanced ? "presetLess" : "presetMore";
        return [
            [this.#autoName(), () => this.choose(AUTO)],
            ...Object.keys(PRESETS).filter((key) => key !== AUTO).map((key) => [presetName(key), () => this.choose(key)]),
            [custom ? this.#customName() : t("sizesCustom"), () => this.#own()],
            [t("sizesToAll"), () => this.toAll(this)],
            // Vue nodes have a button of their own to unfold what is advanced
            ...(globalThis.LiteGraph?.vueNodesMode ? [] : [[t(unfold), () => node.toggleAdvanced()]]),
        ];
    }

    #autoName() {
        const { fits, pictures: [picture] = [] } = this.sent;
        if (picture) return t("sizesAuto", { size: pixels({ ...picture, images: 1 }), count: imageCount(picture.images) });
        return fits?.family ? t("presetFitOf", fits) : t("sizesAutoFit");
    }

    #customName() {
        const sizes = { ...sizesOf(this.node), ...this.outside };
        const given = Object.entries(sizes).filter(([, size]) => size > 0);
        const numbers = { ...sizes, ...this.sent.asked, ...Object.fromEntries(given) };
        return t("presetOwn", { ...numbers, count: imageCount(numbers.max_images) });
    }

    #picked(label) {
        this.#entries().find(([name]) => name === label)?.[1]();
        this.#show();
    }

    #own() {
        if (!this.node.showAdvanced) this.node.toggleAdvanced?.();
        this.choose(CUSTOM);
    }

    #follow(numbers) {
        if (sameSizes(sizesOf(this.node), numbers)) return;
        this.#write(numbers);
        this.#show();
        this.changed();
    }

    /** Set numbers that are Auto's. */
    #write(numbers) {
        this.node.properties ??= {};
        this.node.properties[CHOSEN] = AUTO;
        this.#set(numbers);
    }

    #set(numbers) {
        this.known = numbers;
        applyPreset(this.node, numbers);
        this.known = sizesOf(this.node);
        if (this.choice === AUTO && this.#place) this.followed.set(this.#place, this.known);
    }

    /** The node's graph and id, which the page gives to the node that takes its place after undo. */
    get #place() {
        const { graph, id } = this.node;
        return graph && `${graph.id}:${id}`;
    }

    /** A number has changed: another one than ours is of somebody's own. */
    #typed() {
        const now = sizesOf(this.node);
        if (!sameSizes(now, this.known)) {
            this.known = now;
            if (this.node.properties?.[CHOSEN] === AUTO) this.node.properties[CHOSEN] = CUSTOM;
        }
        this.#show();
    }

    #loaded() {
        this.known = sizesOf(this.node);
        const before = this.followed.get(this.#place);
        if (before && sameSizes(this.known, PRESETS[AUTO]) && this.choice === AUTO) this.#write(before);
        this.sent = { fits: this.sent.fits };
        this.#show();
    }

    /** Save Auto's sizes as zeros, and the choice where the numbers do not tell it. */
    #save(saved) {
        if (!Array.isArray(saved?.widgets_values)) return;
        if (!sameSizes(sizesOf(this.node), this.known)) this.#typed();
        const { choice } = this;
        putValues(this.node.widgets, saved, choice === AUTO ? PRESETS[AUTO] : {});
        if (choice === AUTO) delete saved.properties?.[CHOSEN]; // zeros alone say it
        else if (choice === CUSTOM && saved.properties?.[CHOSEN]) saved.properties[CHOSEN] = CUSTOM;
    }

    /** Show no sizes where an engine serves every one of them. */
    #hide(hidden) {
        const { node } = this;
        for (const widget of [this.widget, ...node.widgets.filter(({ name }) => name in PRESETS[AUTO])]) {
            widget.hidden = hidden; // the canvas reads this one
            widget.options.hidden = hidden; // and Vue nodes that
        }
        node.graph?.setDirtyCanvas?.(true, true);
    }

    #show() {
        const entries = this.#entries().map(([label]) => label), { shown } = this;
        this.widget.options.values = entries;
        this.widget.value = { [AUTO]: entries[0], [CUSTOM]: entries[Object.keys(PRESETS).length] }[shown] ?? presetName(shown);
    }
}

/** The canvas's arrows at both ends of a combo step through its entries, some of which do things: these open the list. */
function openList(widget, { e, node, canvas }) {
    const callback = (value) => widget.setValue(value, { e, node, canvas });
    new globalThis.LiteGraph.ContextMenu(widget.options.values, { event: e, className: "dark", callback, scale: Math.max(1, canvas.ds.scale) });
}

/** Fold a node's advanced widgets on the canvas, which else leaves their rows blank. Vue nodes fold them by themselves. */
function foldOnCanvas(node) {
    for (const widget of node.widgets) if (widget.options?.advanced) widget.advanced = true;
    const { getLayoutWidgets } = node;
    node.getLayoutWidgets = function () {
        return getLayoutWidgets.call(this).filter((widget) => !widget.advanced || this.showAdvanced);
    };
}

/** Whether a workflow has a value of a widget. */
const isSaved = ({ serialize }) => serialize !== false;

/**
 * Close the holes that widgets which are not saved leave, and replace some values.
 * Pages up to 1.52 leave a hole for each such widget. Later pages leave none.
 * @param {{name: string, serialize?: boolean}[]} widgets the node's
 * @param {{widgets_values?: any[], widgets_values_named?: Record<string, any>}} saved the node as the page saves it
 * @param {Record<string, any>} replaced new values by the names of their widgets
 */
export function putValues(widgets, saved, replaced) {
    const values = saved.widgets_values, without = values.length === widgets.filter(isSaved).length;
    const byPlace = without ? values : values.filter((_, place) => widgets[place] && isSaved(widgets[place]));
    saved.widgets_values = widgets.filter(isSaved).map(({ name }, place) => replaced[name] ?? byPlace[place] ?? null);
    const named = saved.widgets_values_named;
    for (const name of Object.keys(replaced)) if (named && name in named) named[name] = replaced[name];
}
