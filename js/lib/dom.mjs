// Small helpers to make elements.

import { t } from "./texts.mjs";

/**
 * @param {string} tag
 * @param {string} [name] its class
 * @param {(string | Element)[]} content texts and elements in it
 */
export function make(tag, name = "", ...content) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...content);
    return made;
}

/** A new element in another one. */
export const part = (parent, tag, name) => parent.appendChild(make(tag, name));

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

/**
 * Make some elements the children of another, and move no one that is in its place: a button that is taken out of the
 * page while the mouse is down on it, even to be put back, loses the click. What has the focus keeps it.
 * @param {Element} parent
 * @param {Element[]} children
 */
export function arrange(parent, children) {
    const wanted = new Set(children), focus = document.activeElement;
    for (const old of [...parent.children]) if (!wanted.has(old)) old.remove();
    children.forEach((child, i) => {
        if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
    });
    if (focus !== document.activeElement && parent.contains(focus)) focus.focus();
}
