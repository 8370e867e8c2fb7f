// What a workflow keeps of an engine node's widgets: values by place and, in newer pages, by name too.

/** Whether a workflow has a value of a widget. */
const isSaved = ({ serialize }) => serialize !== false;

/**
 * Close the holes that widgets which are not saved leave, and put some values in the place of others.
 * Pages up to 1.52 leave a hole for each such widget. Later pages leave none.
 * @param {{name: string, serialize?: boolean}[]} widgets the node's
 * @param {{widgets_values?: any[], widgets_values_named?: Record<string, any>}} saved the node as the page saves it
 * @param {Record<string, any>} others values by the names of their widgets
 */
export function putValues(widgets, saved, others) {
    const values = saved.widgets_values, without = values.length === widgets.filter(isSaved).length;
    const byPlace = without ? values : values.filter((_, place) => widgets[place] && isSaved(widgets[place]));
    saved.widgets_values = widgets.filter(isSaved).map(({ name }, place) => others[name] ?? byPlace[place] ?? null);
    const named = saved.widgets_values_named;
    for (const name of Object.keys(others)) if (named && name in named) named[name] = others[name];
}

/**
 * Mend the values of a workflow that this pack's first version saved with pages from 1.53 on: each stands one place too early.
 * Such a node ends with null, which no other one does. Its names are right, unless the same page had opened such a file before.
 * @param {{name: string, type: string, value: any, serialize?: boolean, options?: {values?: any}}[]} widgets the node's
 * @param {{widgets_values?: any[], widgets_values_named?: Record<string, any>}} saved the node as it was saved
 * @param {Record<string, number>} sizes the numbers of Auto
 * @param {Record<string, any>} defaults values for what is lost
 * @returns {boolean} whether the values were mended
 */
export function mendValues(widgets, saved, sizes, defaults) {
    const values = saved?.widgets_values, kept = widgets.filter(isSaved), names = saved?.widgets_values_named ?? {};
    if (!Array.isArray(values) || values.length !== kept.length || values.at(-1) !== null) return false;
    const auto = kept.every(({ name }, place) => !(name in sizes) || values[place] === sizes[name]);
    const known = kept.every((widget) => fits(widget, names[widget.name]));
    for (const widget of kept) {
        const { name } = widget;
        if (name in sizes) widget.value = known && !auto ? names[name] : sizes[name];
        else widget.value = known ? names[name] : values.find((value) => fits(widget, value)) ?? defaults[name];
    }
    return true;
}

/** Whether a widget can have a value: one of a combo's, or a number. */
function fits({ type, options }, value) {
    return type === "combo" ? Boolean(options?.values?.includes?.(value)) : Number.isFinite(value);
}
