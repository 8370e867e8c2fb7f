// The pack's settings: what a new engine node starts with. Nodes of opened workflows keep what they were saved with.

const CATEGORY = "Hybrid TRT";
const WIDGETS = { when_missing: "HybridTRT.WhenMissing", backend: "HybridTRT.Backend", precision: "HybridTRT.Precision" };

/** As ComfyUI's extensions declare settings. */
export const settings = [
    setting("WhenMissing", "When there is no engine", ["use native", "build now", "build in background"], "use native"),
    setting("Backend", "Backend", ["auto", "onnxruntime", "tensorrt", "tensorrt_rtx", "torch"], "auto"),
    setting("Precision", "Precision", ["auto", "float16", "bfloat16", "float32"], "auto"),
];

/**
 * Give a new node the values that the settings name; values that its widgets do not offer are left alone.
 * @param {{widgets?: {name: string, value: unknown, options?: {values?: unknown[]}}[]}} node
 * @param {(id: string) => unknown} get a setting's value
 */
export function defaultsFor(node, get) {
    for (const widget of node.widgets ?? []) {
        const value = widget.name in WIDGETS ? get(WIDGETS[widget.name]) : undefined;
        if (value !== undefined && widget.options?.values?.includes?.(value)) widget.value = value;
    }
}

function setting(id, name, options, defaultValue) {
    return {
        id: `HybridTRT.${id}`, name, type: "combo", options, defaultValue, category: [CATEGORY, "New engine nodes", name],
        tooltip: "What a new engine node starts with.",
    };
}
