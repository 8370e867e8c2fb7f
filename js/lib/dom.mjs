// Small helpers to make elements.

import { t } from "./texts.mjs";

/**
 * @param {string} tag
 * @param {string} [name] its class
 * @param {string} [text]
 */
export function make(tag, name = "", text = undefined) {
    const part = document.createElement(tag);
    if (name) part.className = name;
    if (text !== undefined) part.textContent = text;
    return part;
}

/**
 * A button with a text of `texts.mjs`.
 * @param {string} key
 * @param {() => void} act
 */
export function button(key, act, words = {}) {
    const made = make("button", "", t(key, words));
    made.type = "button";
    made.addEventListener("click", act);
    return made;
}
