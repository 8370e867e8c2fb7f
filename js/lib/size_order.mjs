// The smallest size lies below the best and the largest: what somebody types against that is refused at once, with a word.

import { follow, sizesOf } from "./presets.mjs";
import { t } from "./texts.mjs";

const RISING = ["min_size", "opt_size", "max_size"];

/**
 * Two of a node's sizes that do not rise, or null. 0 is what fits the model, so it is never wrong.
 * @param {Record<string, number>} sizes
 * @returns {[string, string] | null} the name of the one that has to be smaller, and of the other
 */
export function outOfOrder(sizes) {
    const given = RISING.filter((name) => sizes[name] > 0);
    const wrong = given.findIndex((name, i) => i > 0 && sizes[given[i - 1]] > sizes[name]);
    return wrong < 0 ? null : [given[wrong - 1], given[wrong]];
}

/** What is wrong with a node's sizes, in the names that its widgets show; empty when nothing is. */
export function orderWords(node) {
    const sizes = sizesOf(node), wrong = outOfOrder(sizes);
    if (!wrong) return "";
    const [low, high] = wrong.map((name) => shownName(node, name));
    return t("sizesWrong", { low, high, above: sizes[wrong[0]], below: sizes[wrong[1]] });
}

/**
 * Give a size that is out of order its last value back, and say why.
 * @param {any} node
 * @param {(words: string) => void} say gets nothing ("") at the next change that is right
 */
export function keepOrder(node, say) {
    let before = sizesOf(node);
    for (const widget of node.widgets.filter(({ name }) => RISING.includes(name))) follow(widget, "callback", () => {
        const words = orderWords(node), typed = widget.value;
        // sizes that were wrong already, in a workflow, can only be mended one after the other
        const refused = words && typed !== before[widget.name] && !outOfOrder(before);
        if (refused) widget.value = before[widget.name];
        else before = sizesOf(node);
        say(refused ? `${words} ${t("sizeKept", { name: shownName(node, widget.name), value: widget.value || 0 })}` : words);
    });
    follow(node, "onConfigure", () => {
        before = sizesOf(node);
        say("");
    });
}

function shownName(node, name) {
    return node.widgets.find((widget) => widget.name === name)?.label ?? name;
}
