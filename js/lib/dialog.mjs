// Small dialogs: lines of text, and a question. Each is named by its heading, for screen readers too.

import { button, make } from "./dom.mjs";
import { t } from "./texts.mjs";

let count = 0;

/** Show the lines of a build's log from its end, or of another text from its beginning, with a button to copy them. */
export function showText(title, lines, end = true) {
    const dialog = open(title);
    const text = make("pre", "", lines.length ? lines.join("\n") : t("noLog"));
    text.tabIndex = 0; // so that keys can scroll it
    const copy = button("copy", async () => { copy.textContent = t(await copied(text) ? "copied" : "copyFailed"); });
    const close = button("close", () => dialog.close());
    dialog.append(text, make("div", "hybrid-trt-buttons", copy, close));
    dialog.showModal();
    close.focus();
    if (end) text.scrollTop = text.scrollHeight;
}

/**
 * Ask whether to do something.
 * @param {{title: string, text: string, yes: string, danger?: boolean}} question `yes` says what the button does
 * @returns {Promise<boolean>}
 */
export function confirm({ title, text, yes, danger = false }) {
    return new Promise((answer) => {
        const dialog = open(title, text);
        const end = (result) => { answer(result); dialog.close(); };
        dialog.addEventListener("close", () => answer(false));
        const no = button("no", () => end(false)), act = button("", () => end(true));
        act.textContent = yes;
        act.classList.toggle("hybrid-trt-danger", danger);
        dialog.append(make("div", "hybrid-trt-buttons", no, act));
        dialog.showModal();
        no.focus();
    });
}

function open(title, text) {
    const dialog = make("dialog", "hybrid-trt-dialog"), head = make("h3", "", title);
    head.id = `hybrid-trt-dialog-${count += 1}`;
    dialog.setAttribute("role", "dialog");
    dialog.setAttribute("aria-labelledby", head.id);
    dialog.append(head);
    if (text) {
        const words = make("p", "", text);
        words.id = `${head.id}-text`;
        dialog.setAttribute("aria-describedby", words.id);
        dialog.append(words);
    }
    dialog.addEventListener("keydown", (event) => {
        event.stopPropagation(); // keys typed here are no shortcuts of the canvas
        if (event.key === "Tab" && dialog.matches(":modal")) keepFocus(event, dialog);
    });
    const opener = document.activeElement;
    dialog.addEventListener("close", () => {
        dialog.remove();
        if (opener?.isConnected) opener.focus?.();
    });
    document.body.append(dialog);
    return dialog;
}

/** Tab goes round among what a dialog holds. */
function keepFocus(event, dialog) {
    const stops = [...dialog.querySelectorAll("button, input, [tabindex='0']")];
    const edge = event.shiftKey ? stops[0] : stops.at(-1);
    if (document.activeElement !== edge) return;
    event.preventDefault();
    (event.shiftKey ? stops.at(-1) : stops[0]).focus();
}

/** Copy an element's text; whether that worked. A page that came unencrypted may only copy what is selected. */
async function copied(element) {
    try {
        await navigator.clipboard.writeText(element.textContent);
        return true;
    } catch {
        getSelection().selectAllChildren(element);
        return document.execCommand("copy");
    }
}
