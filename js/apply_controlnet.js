// TRT Apply ControlNet: strengths and ranges survive a change of the number of rows, and are named in the page's language.
//
// The page removes and remakes all widgets below a dynamic combo when its value changes, with their defaults. A strength
// that silently jumps back to 1 is a wrong image, so what a widget had is kept and given to its successor.

import { app } from "../../scripts/app.js";
import { labelRow } from "./lib/labels.mjs";

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

app.registerExtension({
    name: "hybrid_trt.apply_controlnet",
    nodeCreated(node) {
        if (node.comfyClass === "TRTApplyControlNet") keepRowValues(node);
    },
});
