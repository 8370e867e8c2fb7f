// The tab's title while engines are built, for who looks at another tab; ComfyUI writes its own words behind.

import { LIVE } from "./panel_words.mjs";

const MARK = /^\[TRT [^\]]*\] /;

export class TabTitle {
    /** @param {{title: string, hidden: boolean}} page the document */
    constructor(page) {
        this.page = page;
        this.alive = new Set();
    }

    /** A job has changed. */
    hear({ id, state, percent }) {
        LIVE.includes(state) ? this.alive.add(id) : this.alive.delete(id);
        if (state === "running") this.#mark(`[TRT ${percent} %] `);
        else if (!this.alive.size) this.#mark(this.page.hidden ? `[TRT ${state === "done" ? "✓" : "✕"}] ` : "");
    }

    /** The page may be seen again: the end of a build needs no more words. */
    shown() {
        if (!this.page.hidden && !this.alive.size) this.#mark("");
    }

    #mark(words) {
        this.page.title = words + this.page.title.replace(MARK, "");
    }
}
