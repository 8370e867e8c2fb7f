"""The boxes in which nodes say how things stand: whole, inside their node and readable, in both kinds of nodes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import slow
from build_page import NAME
from engine_page import EnginePage
from node_boxes import STATES, close_up, contrast, drawn, measured, server_says, whole
from playwright.sync_api import expect

pytestmark = pytest.mark.browser
BOTH_KINDS_OF_NODES = True

PANEL = "open => app.extensionManager.setting.set('Comfy.RightSidePanel.IsOpen', open)"
RAN = """([id, text, native]) => app.graph.getNodeById(id).onExecuted({ text: [text], native: [native] })"""
#: A run as the page hears of it, without the time that one takes.
KEPT_RUN = """([ids, text]) => { for (const id of ids) {
    const output = { text: [text], native: [true] };
    app.nodeOutputs[id] = output;
    app.graph.getNodeById(id).onExecuted(output); } }"""
HEADS = """() => ['TRTSamplerPatch', 'TRTReport'].map(type => app.graph.nodes.find(n => n.type === type).widgets
    .find(w => w.name === 'run_text').element.querySelector('.hybrid-trt-head').textContent)"""
#: What a comparison says, and whether its picture is drawn.
COMPARED = """id => { const node = app.graph.getNodeById(id);
    const e = node.widgets.find(w => w.name === 'compare_text').element;
    const image = document.querySelector(`[data-node-id='${id}'] img`) ?? node.imgs?.[0];
    return { said: e.textContent, tone: e.dataset.tone, shown: Boolean(image?.complete && image.naturalWidth) }; }"""
REPORT = ("tiny: 8 on onnxruntime, 12.3 ms each, 8 at normal speed, 40.1 ms each (size the engine was not built for)\n"
          "    8 x width 768 px is outside the engine's 64 to 512 px\n"
          "canny: 16 at normal speed, 40.1 ms each (no engine)")


def look(page: EnginePage, palette: str, width: int) -> None:
    page.page.page.set_viewport_size({"width": width, "height": 900 if width > 1400 else 768})
    page.page.page.evaluate("v => app.extensionManager.setting.set('Comfy.ColorPalette', v)", palette)


PAIRS = {"dark-1600": ("dark", 1600), "light-1366": ("light", 1366), "light-1600": ("light", 1600),
         "dark-1366": ("dark", 1366)}


@pytest.mark.parametrize(("palette", "width"), slow.cases(PAIRS, ["light-1600", "light-1366", "dark-1366"]))
def test_every_status_is_drawn_whole_inside_its_node_and_readable(
    page: EnginePage, tiny: dict[str, Any], palette: str, width: int
) -> None:
    if page.page.vue and palette == "light":
        pytest.skip("The box and its colours are the same in both kinds of nodes.")
    shown = ("ready", "unavailable", "failed") if page.page.vue else STATES
    look(page, palette, width)
    symbols = {}
    try:
        for name in (name for name in STATES if name in shown):
            net = drawn(page, tiny, STATES[name])
            page.shot(f"{palette}-{name}")
            box = whole(page, net)
            assert 60 <= box["height"] <= 180
            assert min(contrast(colour, box["ground"]) for colour in box["colours"]) >= 4.5, box
            symbols[name] = box["symbol"]
        unlike = [name for name in ("none", "building", "ready", "native", "failed") if name in symbols]
        assert len({symbols[name] for name in unlike}) == len(unlike)
        page.click_in_status(net, "summary")
        page.page.until_still()
        page.shot(f"{palette}-details")
        assert "so it was not kept; build it in float32, or tell its makers" in page.status(net)["text"]
        box = measured(page, net)
        assert box["inside"], box
    finally:
        look(page, "dark", 1600)


def test_new_nodes_hold_their_text_and_their_title(page: EnginePage) -> None:
    raw = page.page.page
    for index, kind in enumerate(("TRTSamplerPatch", "TRTReport")):
        node = raw.evaluate("""([kind, index]) => { const node = LiteGraph.createNode(kind);
            node.pos = [3000 + 600 * index, 100]; app.graph.add(node); return node.id; }""", [kind, index])
        close_up(page, node)
        size = raw.evaluate("id => [...app.graph.getNodeById(id).size]", node)
        assert (size[0], size[1]) >= (300, 170)
        whole(page, node, "run_text")
        for native in (True, False):
            raw.evaluate(RAN, [node, REPORT, native])
            page.page.until_still()
            box = whole(page, node, "run_text")
            assert box["height"] <= 180
        page.shot(kind)
        said = raw.evaluate("""id => app.graph.getNodeById(id).widgets
            .find(w => w.name === 'run_text').element.textContent""", node)
        assert "16 at normal speed" in said


@slow.when("vue")
def test_a_comparison_shows_its_answer_and_the_difference_on_the_node(page: EnginePage) -> None:
    """Two real pictures go through it."""
    raw = page.page.page
    raw.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    node = raw.evaluate("""() => { const make = (type, x) => { const made = LiteGraph.createNode(type);
            made.pos = [x, 100]; app.graph.add(made); return made; };
        const compare = make('TRTCompare', 400);
        ['control_a.png', 'control_b.png'].forEach((file, input) => {
            const loader = make('LoadImage', -800 + 400 * input);
            loader.widgets.find(w => w.name === 'image').value = file; loader.connect(0, compare, input); });
        return compare.id; }""")
    close_up(page, node)
    assert "Not run yet" in raw.evaluate(COMPARED, node)["said"]
    page.page.queue()
    raw.wait_for_function(f"id => ({COMPARED})(id).shown", arg=node)
    page.page.until_still()
    page.shot("compared")
    told = raw.evaluate(COMPARED, node)
    assert told["tone"] == "warn"
    assert "Different pictures: PSNR " in told["said"]
    assert "The difference is shown " in told["said"]
    whole(page, node, "compare_text")


@slow.when("vue")
def test_what_a_run_said_outlives_another_tab_and_undo(page: EnginePage, tiny: dict[str, Any]) -> None:
    """The page makes all nodes anew for both; what they put out it keeps."""
    raw = page.page.page
    page.page.load(copy.deepcopy(tiny), NAME)
    ids = [page.node(kind) for kind in ("TRTSamplerPatch", "TRTReport")]
    raw.evaluate(KEPT_RUN, [ids, REPORT])

    def said() -> list[str]:
        return raw.evaluate(HEADS)

    raw.wait_for_function(f"() => ({HEADS})().join() === 'Not accelerated,Not accelerated'")
    tab = raw.evaluate("() => app.extensionManager.workflow.activeWorkflow.path")
    raw.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    raw.wait_for_function("() => app.graph.nodes.length === 0")
    raw.locator(".workflow-tabs-container").get_by_text(Path(tab).stem, exact=True).first.click()
    raw.wait_for_function("() => app.graph.nodes.length > 5")
    page.page.until_still()
    assert said() == ["Not accelerated"] * 2
    page.shot("back")

    raw.evaluate("""() => {
        app.graph.nodes.find(n => n.type === 'KSampler').widgets.find(w => w.name === 'steps').value = 9;
        app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }""")
    raw.evaluate("() => app.extensionManager.command.execute('Comfy.Undo')")
    page.page.until_still()
    assert said() == ["Not accelerated"] * 2

    page.page.load(copy.deepcopy(tiny), "another")
    page.page.until_still()
    assert said() == ["Not run yet"] * 2, "another workflow has not run"


def test_a_native_run_puts_a_badge_on_the_node(page: EnginePage, tiny: dict[str, Any]) -> None:
    raw, net = page.page.page, drawn(page, tiny, STATES["ready"])
    server_says(page, STATES["native"])
    raw.evaluate("() => app.api.dispatchCustomEvent('hybrid_trt.library', {})")
    page.wait_until(net, lambda s: "3 of" in s["text"] or "8 of" in s["text"], "run", 60)
    raw.wait_for_function("""id => app.graph.getNodeById(id).badges.map(b => (b.text === undefined ? b() : b).text)
        .includes('TRT: partly accelerated')""", arg=net)
    if page.page.vue:
        raw.locator(f"[data-node-id='{net}']").get_by_text("TRT: partly accelerated").wait_for()
    page.shot("badge")


@slow.when("vue")
def test_the_properties_panel_leaves_the_status_box_as_it_is(page: EnginePage, tiny: dict[str, Any]) -> None:
    raw, net = page.page.page, drawn(page, tiny, STATES["native"])
    before = whole(page, net)
    raw.evaluate("id => app.canvas.selectNode(app.graph.getNodeById(id))", net)
    raw.evaluate(PANEL, True)
    panel = raw.get_by_test_id("properties-panel")
    panel.wait_for()
    page.page.until_still()
    page.shot("panel")
    expect(panel).to_contain_text("If no engine yet")
    assert "engine_status" not in panel.inner_text()
    raw.evaluate("""id => { app.canvas.setDirty(true, true);
        app.graph.getNodeById(id).widgets.find(w => w.name === 'engine_status').width = 120; }""", net)
    page.page.until_still()
    after = whole(page, net)
    assert after["width"] == before["width"]
    raw.evaluate(PANEL, False)


def test_the_one_node_is_found_by_what_it_is_for(page: EnginePage) -> None:
    """ComfyUI's page ranks names before aliases: of two words it finds a node of its own first that is called so."""
    if page.page.vue:
        pytest.skip("The same search in both modes.")
    raw = page.page.page
    raw.evaluate("() => { app.extensionManager.command.execute('Workspace.SearchBox.Toggle') }")
    field, dialog = raw.get_by_role("dialog").last.locator("input").first, raw.get_by_role("dialog").last
    field.wait_for()
    before = {"speed": ["Seed"], "compile": ["TorchCompileModel"]}
    for word in ("accelerate", "faster", "tensorrt", "optimize", "fast", "speed up", *before):
        field.fill(word)
        dialog.get_by_text("TRT Accelerate").first.wait_for()
        page.page.until_still()
        page.shot(word)
        lines = dialog.inner_text().splitlines()
        above = lines[: lines.index("TRT Accelerate")]
        known = ("Seed", "TorchCompileModel", "TRT UNet Engine", "TRT Report")
        assert [name for name in known if name in above] == before.get(word, []), word
    raw.keyboard.press("Escape")
