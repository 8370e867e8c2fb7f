// Small dialogs: a build's log, a question, and an offer.

import { t } from "./texts.mjs";

/** Show the lines of a build's log. */
export function showText(title, lines) {
    const dialog = open(title);
    const text = document.createElement("pre");
    text.textContent = lines.length ? lines.join("\n") : t("noLog");
    dialog.append(text, buttons(button(t("close"), () => dialog.close())));
    dialog.showModal();
    text.scrollTop = text.scrollHeight;
}

/**
 * Ask yes or no.
 * @returns {Promise<boolean>}
 */
export function confirm(question) {
    return new Promise((answer) => {
        const dialog = open(t("panel"));
        const text = document.createElement("p");
        text.textContent = question;
        const end = (result) => { answer(result); dialog.close(); };
        dialog.addEventListener("close", () => answer(false));
        dialog.append(text, buttons(button(t("no"), () => end(false)), button(t("yes"), () => end(true))));
        dialog.showModal();
    });
}

/**
 * Ask for a number in a corner of the page, which stays usable.
 * @returns {Promise<number | null>} null when it was declined
 */
export function askNumber(title, text, value, yes, no) {
    return new Promise((answer) => {
        const dialog = open(title);
        dialog.classList.add("hybrid-trt-corner");
        const words = document.createElement("p"), field = document.createElement("input");
        words.textContent = text;
        Object.assign(field, { type: "number", min: "1", step: "any", value: String(value) });
        field.setAttribute("aria-label", title);
        const end = (result) => { answer(result); dialog.close(); };
        dialog.addEventListener("close", () => answer(null));
        dialog.append(words, field, buttons(button(no, () => end(null)), button(yes, () => field.value > 0 && end(Number(field.value)))));
        dialog.show();
    });
}

function open(title) {
    const dialog = document.createElement("dialog");
    dialog.className = "hybrid-trt-dialog";
    const head = document.createElement("h3");
    head.textContent = title;
    dialog.append(head);
    // keys typed here are no shortcuts of the canvas
    dialog.addEventListener("keydown", (event) => event.stopPropagation());
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    return dialog;
}

function button(label, act) {
    const made = document.createElement("button");
    made.textContent = label;
    made.addEventListener("click", act);
    return made;
}

function buttons(...made) {
    const row = document.createElement("div");
    row.className = "hybrid-trt-buttons";
    row.append(...made);
    return row;
}
