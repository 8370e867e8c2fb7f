// What of a graph can be read: whether a node is in sight, and templates that open readable. The page fits all of a
// template into its window, and below a scale it draws no text on nodes; then the pack's own templates start at their
// top left instead, where the note stands.

/** Where the first node goes: right of the sidebar, below the tabs. */
const CORNER = [80, 112];
const READABLE = 0.6, FITTED = 150;
/** What `tools/make_workflows.py` marks templates with. */
export const MARK = "hybrid_trt_template";

/**
 * The view for nodes that were fitted into the window: the same, or a larger one of their top left.
 * @param {number} scale what the page chose
 * @param {number[][]} boxes x, y, width, height of the nodes
 * @returns {{scale: number, offset: [number, number]} | null} null when the page's own view can be read
 */
export function readableView(scale, boxes) {
    if (scale >= READABLE || !boxes.length) return null;
    const first = [0, 1].map((i) => Math.min(...boxes.map((box) => box[i])));
    return { scale: READABLE, offset: CORNER.map((at, i) => at / READABLE - first[i]) };
}

/** Whether somebody can read a node now: it is in the open graph, its middle in the window, not too small. */
export function inSight({ graph, ds }, node) {
    if (document.hidden || node.graph !== graph || ds.scale < READABLE) return false;
    const from = ds.visible_area;
    return [0, 1].every((i) => {
        const middle = node.pos[i] + node.size[i] / 2;
        return middle > from[i] && middle < from[i] + from[i + 2];
    });
}

/**
 * Make an opened template readable, once, its notes and titles in the page's language; what is saved of it is opened as it was left.
 * @param {any} app
 * @param {(text: string) => string} translated of a note, or of a group's or node's title
 */
export function openReadable(app, translated = (text) => text) {
    const { extra } = app.rootGraph ?? app.graph ?? {};
    if (!extra?.[MARK]) return;
    delete extra[MARK];
    const { nodes, groups = [] } = app.canvas.graph;
    for (const one of [...nodes, ...groups]) if (one.title) one.title = translated(one.title);
    for (const { type, widgets } of nodes)
        if (type === "MarkdownNote") for (const widget of widgets) widget.value = translated(widget.value);
    setTimeout(() => {
        const { ds } = app.canvas, view = readableView(ds.scale, app.canvas.graph.nodes.map((node) => [...node.getBounding()]));
        if (!view) return;
        ds.scale = view.scale;
        [ds.offset[0], ds.offset[1]] = view.offset;
        app.canvas.setDirty(true, true);
    }, FITTED);
}
