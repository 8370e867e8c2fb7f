// TRT Apply ControlNet: strengths and ranges survive a change of the number of rows, and are named in the page's language.
//
// The page removes and remakes all widgets below a dynamic combo when its value changes, with their defaults. A strength
// that silently jumps back to 1 is a wrong image, so what a widget had is kept and given to its successor.

import { app } from "../../scripts/app.js";
import { labelRow } from "./lib/labels.mjs";
import { APPLY_CONTROLNET } from "./lib/node_names.mjs";

const PREFIX = "rows.";

/**
 * Remember the row widgets' values on removal and restore them in widgets of the same name.
 * @param {object} node the node that has just been created
 */
function keepRowValues(node) {
    /** @type {Record<string, unknown>} */
    const kept = {};
    const tend = (widget) => {
        if (!widget?.name?.startsWith(PREFIX)) return;
        if (widget.name in kept) widget.value = kept[widget.name];
        labelRow(widget);
        const removed = widget.onRemove;
        widget.onRemove = function (...args) {
            kept[widget.name] = widget.value;
            return removed?.apply(this, args);
        };
    };
    node.inputs?.forEach(labelRow);
    const addInput = node.addInput;
    node.addInput = function (...args) {
        const input = addInput.apply(this, args);
        labelRow(input);
        return input;
    };
    const configured = node.onConfigure; // a workflow brings the names of the language that it was saved in
    node.onConfigure = function (...args) {
        configured?.apply(this, args);
        keepHeight(this, args[0]?.size);
        [...(this.inputs ?? []), ...(this.widgets ?? [])].forEach(labelRow);
    };
    node.widgets?.forEach(tend);
    const add = node.addWidget;
    node.addWidget = function (...args) {
        const widget = add.apply(this, args);
        tend(widget);
        return widget;
    };
}

/**
 * Give a Vue node that is made anew the height that it was saved with, if LiteGraph's is less.
 *
 * The page shrinks a node below a dynamic combo to LiteGraph's height. Vue nodes are higher, and measured only when their
 * boxes change, which undo does not: the other height would be a further edit, and undo would never get past it.
 * @param {object} node
 * @param {number[] | undefined} saved its width and height
 */
function keepHeight(node, saved) {
    if (globalThis.LiteGraph?.vueNodesMode && saved?.[1] > node.size[1]) node.setSize([node.size[0], saved[1]]);
}

app.registerExtension({
    name: "hybrid_trt.apply_controlnet",
    nodeCreated(node) {
        if (node.comfyClass === APPLY_CONTROLNET) keepRowValues(node);
    },
});
