// A menu that a button opens: arrow keys move in it, Escape and a click elsewhere close it.

import { make } from "./dom.mjs";

/**
 * Open a menu below a button; a second press closes it.
 * @param {HTMLElement} opener
 * @param {{label: string, act: () => void, danger?: boolean}[]} entries
 */
export function openMenu(opener, entries) {
    if (opener.getAttribute("aria-expanded") === "true") return;
    const menu = make("div", "hybrid-trt-menu");
    menu.setAttribute("role", "menu");
    const open = new AbortController(), { top } = opener.getBoundingClientRect();
    const shut = (focus) => {
        open.abort(); // takes the listeners away
        menu.remove();
        opener.setAttribute("aria-expanded", "false");
        if (focus) opener.focus();
    };
    const outside = (event) => { if (!menu.contains(event.target) && !opener.contains(event.target)) shut(false); };
    const scrolled = () => { if (Math.abs(opener.getBoundingClientRect().top - top) > 1) shut(false); };
    const items = entries.map(({ label, act, danger }) => {
        const item = make("button", danger ? "hybrid-trt-danger" : "", label);
        item.type = "button";
        item.setAttribute("role", "menuitem");
        item.addEventListener("click", () => { shut(true); act(); });
        return item;
    });
    menu.append(...items);
    menu.addEventListener("keydown", (event) => {
        event.stopPropagation(); // keys pressed here are no shortcuts of the canvas
        if (event.key === "Escape" || event.key === "Tab") shut(true);
        const next = nextIndex(event.key, items.indexOf(document.activeElement), items.length);
        if (next !== null || event.key === "Escape") event.preventDefault();
        if (next !== null) items[next].focus();
    });
    document.body.append(menu);
    place(menu, opener);
    opener.setAttribute("aria-expanded", "true");
    opener.addEventListener("click", () => shut(false), { signal: open.signal });
    document.addEventListener("pointerdown", outside, { capture: true, signal: open.signal });
    document.addEventListener("scroll", scrolled, { capture: true, signal: open.signal });
    items[0].focus({ preventScroll: true });
}

/** Which entry a key leads to; null for keys that move nothing. */
export function nextIndex(key, index, count) {
    if (key === "ArrowDown") return (index + 1) % count;
    if (key === "ArrowUp") return (index + count - 1) % count;
    return { Home: 0, End: count - 1 }[key] ?? null;
}

function place(menu, opener) {
    const at = opener.getBoundingClientRect(), { width, height } = menu.getBoundingClientRect();
    const top = at.bottom + height < innerHeight ? at.bottom : Math.max(4, at.top - height);
    Object.assign(menu.style, { top: `${top}px`, left: `${Math.max(4, Math.min(at.right - width, innerWidth - width - 4))}px` });
}
