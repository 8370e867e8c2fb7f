// Badges on nodes: how they are made and drawn anew, and the one of subgraph nodes that hold engine nodes. No file has them.

import { engineNodes } from "./graph.mjs";
import { t } from "./texts.mjs";

/** A badge of LiteGraph's; none is drawn without a text. */
export function badge(text, fgColor, bgColor) {
    return new window.LGraphBadge({ text, fgColor, bgColor });
}

/** Have a node's badges drawn anew: Vue nodes draw what is another array than before. */
export function drawBadges(node) {
    const { badges } = node;
    node.graph?.trigger?.("node:property:changed", {
        type: "node:property:changed", nodeId: node.id, property: "badges", oldValue: badges, newValue: [...badges],
    });
}

const holds = (node) => engineNodes({ nodes: [node] }).length > 0;

/** Let a new subgraph node say whether engine nodes are inside. It looks whenever it is drawn, and Vue nodes when they are made. */
export function giveMark(node) {
    if (window.LGraphBadge) node.badges?.push(() => badge(holds(node) ? t("inside") : "", "#dff5e8", "#2f6b4f"));
}

/** The titles of a graph's subgraph nodes that hold engine nodes. */
export function titlesOfHolders(graph) {
    return (graph?.nodes ?? []).filter((node) => node.isSubgraphNode?.() && holds(node)).map(({ title }) => title);
}
