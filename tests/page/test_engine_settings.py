"""Sizes, the library's limit, Chinese, and what outlives a reload or a restart, in ComfyUI's page; with real clicks."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import slow
from build_page import NET_1 as NET
from build_page import TITLE, load, no_engines
from engine_page import STACK_MEASURED, EnginePage, reload
from fake_engine import publish
from node_boxes import DRAWS_CHINESE, STATES, close_up, drawn, whole
from shipped_workflows import shipped
from workflow_recipes import with_tiny_models
from workflow_to_prompt import set_widget

pytestmark = pytest.mark.browser
BOTH_KINDS_OF_NODES = True

SIZES = ("min_size", "opt_size", "max_size", "max_images", "max_tokens")
PRESET = "id => app.graph.getNodeById(id).widgets.find(w => w.name === 'size_preset').value"
#: A node's five numbers.
SIZES_OF = f"""id => Object.fromEntries(app.graph.getNodeById(id).widgets
    .filter(w => {json.dumps(SIZES)}.includes(w.name)).map(w => [w.name, w.value]))"""
#: Another backend, as one edit.
BACKEND = """([id, name]) => { app.graph.getNodeById(id).widgets.find(w => w.name === 'backend').value = name;
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }"""
#: Width and height of the picture, as one edit.
RESIZE = """side => { const [width, height] = app.graph.nodes.find(n => n.type === 'EmptyLatentImage').widgets;
    width.value = height.value = side;
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }"""
#: The picture's width, how many steps can be undone, and whether the workflow counts as modified.
HISTORY = """() => { const { changeTracker, isModified } = app.extensionManager.workflow.activeWorkflow;
    return [app.graph.nodes.find(n => n.type === 'EmptyLatentImage').widgets[0].value, changeTracker.undoQueue.length,
            isModified]; }"""
#: The workflow as if it had just been saved, with what the page itself changes when it opens one.
AS_SAVED = """() => { const workflow = app.extensionManager.workflow.activeWorkflow;
    workflow.changeTracker.captureCanvasState();
    workflow.changeTracker.reset();
    workflow.changeTracker.undoQueue.length = 0;
    workflow.isModified = false; }"""
#: What a combo shows on the canvas.
DISPLAYED = "([id, name]) => app.graph.getNodeById(id).widgets.find(w => w.name === name)._displayValue"
#: What a node's widgets are, and which of them a person sees.
WIDGETS = """id => { const node = app.graph.getNodeById(id); return Object.fromEntries(node.widgets.map(w => [w.name,
    { value: w.value, seen: node.isWidgetVisible(w) }])); }"""


def choose(page: EnginePage, node: int, now: str, entry: str) -> None:
    """Pick one of a node's picture sizes; in Vue nodes the combo is found by what it says now."""
    raw = page.page.page
    if page.page.vue:
        raw.locator(f"[data-node-id='{node}']").get_by_role("combobox").filter(has_text=now).click()
        raw.get_by_role("option", name=entry).click()
    else:
        page.click(node, "size_preset")
        raw.locator(".litecontextmenu").get_by_text(entry).click()
    page.page.settle()


def test_a_person_sees_one_preset_and_the_numbers_on_demand(page: EnginePage, tiny: dict[str, Any]) -> None:
    load(page, tiny)
    before, saved = page.page.prompt(), page.page.workflow()
    raw, net = page.page.page, page.node(NET)
    close_up(page, net)
    page.shot("folded")
    widgets = raw.evaluate(WIDGETS, net)
    assert [name for name in SIZES if widgets[name]["seen"]] == []
    assert "64 to 512" in widgets["size_preset"]["value"]

    choose(page, net, "Custom", "SDXL, all usual formats")
    widgets = raw.evaluate(WIDGETS, net)
    assert [widgets[name]["value"] for name in SIZES] == [640, 1024, 1536, 1, 231]
    now = page.page.prompt()
    changed = {name: now[str(net)]["inputs"][name] for name in SIZES}
    assert changed == {"min_size": 640, "opt_size": 1024, "max_size": 1536, "max_images": 1, "max_tokens": 231}
    assert set(now[str(net)]["inputs"]) == set(before[str(net)]["inputs"])

    if page.page.vue:
        shown = raw.locator(f"[data-node-id='{net}']")
        assert shown.get_by_text("Largest size").count() == 0
        shown.get_by_text("Show advanced inputs").click()
        shown.get_by_text("Largest size").wait_for()
        shown.get_by_text("Hide advanced inputs").click()
        shown.get_by_text("Largest size").wait_for(state="detached")
        choose(page, net, "SDXL", "Custom")
        shown.get_by_text("Largest size").wait_for()
    else:
        choose(page, net, "", "Show all settings")
        assert all(raw.evaluate(WIDGETS, net)[name]["seen"] for name in SIZES)
        page.page.settle()
        choose(page, net, "", "Hide the settings")
        assert not any(raw.evaluate(WIDGETS, net)[name]["seen"] for name in SIZES)
        choose(page, net, "", "Custom")
        assert all(raw.evaluate(WIDGETS, net)[name]["seen"] for name in SIZES)
    page.page.settle()
    page.shot("unfolded")

    # what is saved has the same values in the same order as before there were presets
    node = next(n for n in saved["nodes"] if str(n["id"]) == str(net))
    assert node["widgets_values"] == ["build now", 64, 128, 512, 4, 616, "auto", "auto", "built in"]
    load(page, copy.deepcopy(saved))
    assert page.page.prompt() == before


@slow.when("litegraph")
def test_sizes_are_asked_for_where_an_engine_is_not_for_all_of_them(page: EnginePage) -> None:
    no_engines(page.comfy)
    made = with_tiny_models(shipped("zimage_text_to_image"), page.info)
    for name, value in (("backend", "torch"), ("when_missing", "use native")):
        set_widget(made, "TRTAccelerate", name, value, page.info)
    load(page, made)
    raw, node = page.page.page, page.node("TRT Accelerate")
    page.comfy.queue(page.page.prompt())  # the node learns of its model; the tiny text encoder is of another family
    for backend, seen in (("torch", False), ("onnxruntime", True), ("torch", False)):
        raw.evaluate(BACKEND, [node, backend])
        page.wait_until(node, lambda _, seen=seen: raw.evaluate(WIDGETS, node)["size_preset"]["seen"] is seen, backend)
        assert [name for name in SIZES if raw.evaluate(WIDGETS, node)[name]["seen"]] == []
        page.page.settle()
        page.shot(f"sizes with {backend}")
        if page.page.vue:
            assert raw.locator(f"[data-node-id='{node}']").get_by_text("Picture size").count() == seen


@slow.when("vue")
def test_auto_follows_the_workflows_picture_and_goes_to_the_samplers_other_nodes(
    page: EnginePage, tiny: dict[str, Any]
) -> None:
    no_engines(page.comfy)
    made, raw, info = copy.deepcopy(tiny), page.page.page, page.info
    set_widget(made, "EmptyLatentImage", "width", 576, info)
    set_widget(made, "EmptyLatentImage", "height", 320, info)
    load(page, made)
    net, unet = page.node(NET), page.node("TRTUNetEngine")
    before = raw.evaluate(SIZES_OF, net)
    close_up(page, net)
    choose(page, net, "Custom", "Auto: 576×320, 1 image")
    zeros = dict.fromkeys(SIZES, 0)
    assert raw.evaluate(SIZES_OF, net) == zeros | {"opt_size": 448}
    assert raw.evaluate(PRESET, net) == "Auto: 576×320, 1 image"
    page.shot("auto")
    raw.evaluate("""() => { app.graph.nodes.find(n => n.type === 'EmptyLatentImage').widgets[0].value = 320;
        app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }""")
    raw.wait_for_function(f"id => ({SIZES_OF})(id).opt_size === 320", arg=net)
    assert raw.evaluate(SIZES_OF, unet) == before, "a node with numbers of its own keeps them"

    choose(page, net, "Auto", "Apply to all engine nodes")
    for node in (unet, page.node("TRT ControlNet Engine 2")):
        assert raw.evaluate(SIZES_OF, node) == zeros | {"opt_size": 320}
    saved = page.page.workflow()
    load(page, saved)
    assert raw.evaluate(SIZES_OF, unet) == zeros | {"opt_size": 320}
    raw.wait_for_function(f"id => ({PRESET})(id) === 'Auto: 320×320, 1 image'", arg=unet)


@slow.when("litegraph")
def test_what_auto_follows_is_no_edit(page: EnginePage, tiny: dict[str, Any]) -> None:
    """Undo by mouse, whose button's release the page takes for the end of an edit."""
    made, raw, info = copy.deepcopy(tiny), page.page.page, page.info
    for engine in ("TRTUNetEngine", "TRTControlNetEngine"):
        for name in SIZES:
            set_widget(made, engine, name, 0, info)
    for side in ("width", "height"):
        set_widget(made, "EmptyLatentImage", side, 576, info)
    load(page, made)
    unet = page.node("TRTUNetEngine")
    follows = f"([id, size]) => ({SIZES_OF})(id).opt_size === size"
    raw.wait_for_function(follows, arg=[unet, 576])
    raw.wait_for_function(STACK_MEASURED)
    raw.mouse.click(800, 850)
    raw.evaluate(AS_SAVED)
    assert raw.evaluate(HISTORY) == [576, 0, False]
    for steps, side in enumerate((768, 640), 1):
        raw.evaluate(RESIZE, side)
        raw.wait_for_function(follows, arg=[unet, side])
        raw.mouse.click(800, 850)
        assert raw.evaluate(HISTORY) == [side, steps, True]
    for steps, side in ((1, 768), (0, 576)):
        raw.evaluate("() => app.extensionManager.command.execute('Comfy.Undo')")
        raw.wait_for_function(follows, arg=[unet, side])
        raw.mouse.click(800, 850)
        assert raw.evaluate(HISTORY) == [side, steps, steps > 0]
    assert page.page.prompt()[str(unet)]["inputs"]["opt_size"] == 576, "prompts have the numbers"
    node = next(n for n in page.page.workflow()["nodes"] if str(n["id"]) == str(unet))
    assert node["widgets_values"][1:6] == [0] * 5


@slow.when("vue")
def test_the_limit_is_set_in_the_settings_dialog(page: EnginePage) -> None:
    root = page.comfy.base / "models" / "trt_engines"
    publish(root)
    file = root / ".settings.json"
    file.unlink(missing_ok=True)
    raw = page.page.page
    raw.evaluate("() => { app.extensionManager.command.execute('Comfy.ShowSettingsDialog') }")
    raw.get_by_text("Hybrid TRT", exact=True).first.click()
    field = raw.get_by_role("spinbutton", name="Disk space limit (GB)")
    field.wait_for()
    raw.wait_for_function("e => !e.disabled", arg=field.element_handle())
    assert field.input_value() == "0"
    raw.get_by_text(str(root)).wait_for()
    raw.get_by_text("extra_model_paths.yaml").wait_for()
    field.fill("12.5")
    field.press("Tab")
    raw.get_by_text("Saved; the next build keeps it.").wait_for()
    page.shot("saved")
    assert json.loads(file.read_text())["limit_gb"] == 12.5
    level = raw.get_by_role("spinbutton", name="TensorRT: optimization level")
    level.fill("2")
    level.press("Tab")
    raw.get_by_text("Saved; the next build keeps it.").nth(1).wait_for()
    assert json.loads(file.read_text()) == {"limit_gb": 12.5, "build_minutes": 0.0, "tensorrt_level": 2}
    field.fill("-3")
    field.press("Tab")
    raw.get_by_text("has to lie between 0").wait_for()
    page.shot("refused")
    assert json.loads(file.read_text())["limit_gb"] == 12.5
    file.unlink()
    field.press("Escape")
    field.wait_for(state="detached")


@slow.when("litegraph")
@pytest.mark.slow
def test_chinese_is_on_templates_nodes_panel_and_settings_and_fits(page: EnginePage, tiny: dict[str, Any]) -> None:
    raw = page.page.page

    def speak(language: str) -> None:
        raw.evaluate("v => app.extensionManager.setting.set('Comfy.Locale', v)", language)
        reload(page)

    try:
        speak("zh")
        raw.evaluate("() => { app.graph.clear(); app.extensionManager.command.execute('Comfy.BrowseTemplates') }")
        raw.get_by_role("dialog").last.get_by_text("hybrid-trt", exact=True).first.click()
        raw.get_by_test_id(f"template-workflow-{TITLE}").click()
        raw.wait_for_function("count => app.graph.nodes.length === count", arg=len(tiny["nodes"]))
        (note,) = (node for node in page.page.workflow()["nodes"] if node["type"] == "MarkdownNote")
        assert note["widgets_values"][0].startswith("# 高级：每个引擎一个节点")
        titles = raw.evaluate("() => [...app.graph.groups, ...app.graph.nodes].map(one => one.title)")
        own = re.compile("|".join(("Checkpoint", "VAE", "CLIP", "LoRA", "ControlNet", "TRT", "UNet", "Latent", "K")))
        assert [title for title in titles if re.search("[A-Za-z]", own.sub("", title))] == [], "all is Chinese"
        saved = {**tiny, "extra": {}}  # no template: its titles stay
        load(page, saved)
        net = page.node(NET)
        close_up(page, net)
        status = page.status(net)
        assert status["button"] in ("构建引擎", "重新构建")
        assert "自定义" in raw.evaluate(WIDGETS, net)["size_preset"]["value"]
        labels = raw.evaluate("id => app.graph.getNodeById(id).widgets.map(w => w.label)", net)
        assert {"还没有引擎时", "图像尺寸"} <= set(labels)
        apply = page.node("TRTApplyControlNet")
        rows = raw.evaluate("id => app.graph.getNodeById(id).widgets.map(w => w.label)", apply)
        assert {"强度 1", "起点 2", "终点 2"} <= set(rows)
        inputs = raw.evaluate("id => app.graph.getNodeById(id).inputs.map(i => i.label ?? i.localized_name)", apply)
        assert {"图像 1", "ControlNet 2"} <= set(inputs)
        if page.page.vue:
            raw.locator(f"[data-node-id='{net}']").get_by_text("先构建", exact=True).wait_for()
        else:
            assert raw.evaluate(DISPLAYED, [net, "when_missing"]) == "先构建"
        assert page.page.prompt()[str(net)]["inputs"]["when_missing"] == "build now"
        raw.get_by_role("button", name="TRT 引擎").click()
        panel = raw.locator(".hybrid-trt-panel")
        panel.get_by_placeholder("筛选").wait_for(state="attached")  # seen where there are engines
        panel.get_by_text("刷新").wait_for()
        page.shot("node-and-panel")
        raw.get_by_role("button", name="TRT 引擎").click()
        for name, state in STATES.items() if raw.evaluate(DRAWS_CHINESE) else ():
            net = drawn(page, saved, state)
            assert 60 <= whole(page, net)["height"] <= 180
            assert re.search("[\u4e00-\u9fff]", page.status(net)["title"]), name
        raw.evaluate("() => { app.extensionManager.command.execute('Comfy.ShowSettingsDialog') }")
        raw.get_by_text("Hybrid TRT", exact=True).first.click()
        raw.get_by_text("没有引擎时").first.wait_for()
        for hint in ("不会自动删除任何引擎", "超时的构建会被放弃", "0 由 TensorRT 自行选择"):
            raw.get_by_text(hint).wait_for()
        raw.get_by_role("combobox").filter(has_text="适合模型").wait_for()
        page.shot("settings")
    finally:
        speak("en")
