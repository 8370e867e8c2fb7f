import assert from "node:assert/strict";
import { test } from "node:test";
import { switchedOff } from "../../js/lib/off.mjs";
import { t } from "../../js/lib/texts.mjs";
import { describe } from "../../js/lib/words.mjs";

const MUTED = 2, BYPASSED = 4;

/** A switched-off node whose output goes to nodes in these modes. */
function off(comfyClass, mode, readers = [0]) {
    const nodes = readers.map((mode, i) => ({ id: 10 + i, mode }));
    const graph = { getLink: (id) => ({ target_id: 10 + id }), getNodeById: (id) => nodes.find((node) => node.id === id) };
    return switchedOff({ comfyClass, mode, graph, outputs: [{ links: readers.map((_, i) => i) }] });
}

test("only what truly runs native without its engine node says so, and more than speed is lost in amber", () => {
    const native = { text: t("offHint"), tone: "idle" };
    assert.deepEqual(off("TRTControlNetEngine", BYPASSED), native);
    assert.deepEqual(off("TRTControlNetEngine", MUTED), { text: t("offMuted"), tone: "warn" });
    for (const mode of [MUTED, BYPASSED]) {
        for (const readers of [[0], [MUTED], [BYPASSED, 0]])
            assert.deepEqual(off("TRTUNetEngine", mode, readers), { text: t("offUnet"), tone: "warn" });
        assert.deepEqual(off("TRTUNetEngine", mode, [BYPASSED]), native);
    }
    assert.equal(off("TRTUNetEngine", 0).text, t("offInside"));
});

test("a node says it under its own title", () => {
    const view = describe({ state: "off", ...off("TRTUNetEngine", MUTED), run: null });
    assert.deepEqual([view.title, view.tone, view.lines], [t("off"), "warn", [t("offUnet")]]);
});
