import assert from "node:assert/strict";
import { test } from "node:test";
import { describe, switchedOff } from "../../js/lib/words.mjs";
import { t } from "../../js/lib/texts.mjs";

const MUTED = 2, BYPASSED = 4;

const off = (comfyClass, mode) => switchedOff({ comfyClass, mode });

test("what runs native without its engine node says so, and more than speed is lost in amber", () => {
    const native = { text: t("offHint"), tone: "idle" };
    assert.deepEqual(off("TRTControlNetEngine", BYPASSED), native);
    assert.deepEqual(off("TRTControlNetEngine", MUTED), { text: t("offMuted"), tone: "warn" });
    for (const mode of [MUTED, BYPASSED]) assert.deepEqual(off("TRTUNetEngine", mode), native);
    for (const type of ["TRTAccelerate", "TRTVAEEngine"]) {
        assert.deepEqual(off(type, BYPASSED), native);
        assert.deepEqual(off(type, MUTED), { text: t("offRefused"), tone: "warn" }); // the nodes behind it lack a connection
    }
    assert.match(t("offRefused"), /refuses.+Bypass/);
    assert.equal(off("TRTUNetEngine", 0).text, t("offInside"));
});

test("a node says it under its own title", () => {
    const view = describe({ state: "off", ...off("TRTControlNetEngine", MUTED), run: null });
    assert.deepEqual([view.title, view.tone, view.lines], [t("off"), "warn", [t("offMuted")]]);
});
