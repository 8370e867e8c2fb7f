import assert from "node:assert/strict";
import { test } from "node:test";
import { TabTitle } from "../../js/lib/tab_title.mjs";

test("the tab's title tells of builds, and of their end to who looks elsewhere; the page's own words stay", () => {
    const page = { title: "ComfyUI", hidden: false }, tab = new TabTitle(page), seen = [];
    const hear = (id, state, percent = 0) => {
        tab.hear({ id, state, percent });
        seen.push(page.title);
    };
    hear("a", "queued");
    hear("a", "running", 7);
    page.title = "*work - ComfyUI"; // ComfyUI writes it too
    hear("a", "running", 8);
    hear("b", "running", 1);
    hear("a", "done");
    hear("b", "failed");
    assert.deepEqual(seen, ["ComfyUI", "[TRT 7 %] ComfyUI", "[TRT 8 %] *work - ComfyUI", "[TRT 1 %] *work - ComfyUI", "[TRT 1 %] *work - ComfyUI", "*work - ComfyUI"]);
    page.hidden = true;
    hear("c", "done");
    assert.equal(page.title, "[TRT ✓] *work - ComfyUI");
    tab.shown();
    assert.equal(page.title, "[TRT ✓] *work - ComfyUI", "nobody has seen it yet");
    page.hidden = false;
    tab.shown();
    assert.equal(page.title, "*work - ComfyUI");
});
