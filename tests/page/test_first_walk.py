"""A first-time walk through ComfyUI's page: an empty canvas, a template, one press for all engines, a run on them.

The template's model files are there under their own names; what is in them are the tiny models.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slow
from browser import TOAST, ComfyPage, chromium, comfy_page
from builds import paused
from comfy_process import ComfyProcess
from engine_page import EnginePage
from playwright.sync_api import expect
from shipped_workflows import shipped

pytestmark = pytest.mark.browser

FILES = {
    "checkpoints/v1-5-pruned-emaonly-fp16.safetensors": "tiny_sd15",
    "controlnet/control_v11p_sd15_canny_fp16.safetensors": "tiny_sd15_a",
    "controlnet/control_v11f1p_sd15_depth_fp16.safetensors": "tiny_sd15_b",
}
"""Files that the templates ask for, and the tiny model in the place of each."""
ENGINES = ("TRTUNetEngine", "TRT ControlNet Engine 1", "TRT ControlNet Engine 2")
#: Collects every banner of ComfyUI's that says how a job ended.
BANNERS = """() => { window.__banners = [];
    const look = () => __banners.push(...document.body.innerText.match(/\\bjobs? (completed|failed)\\b/gi) ?? []);
    new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true }); }"""
#: Resolves when what an element lists has been drawn again.
DRAWN = """selector => new Promise(done => { const seen = new MutationObserver(() => { seen.disconnect(); done(); });
    seen.observe(document.querySelector(selector), { childList: true, subtree: true, characterData: true }); })"""
#: A picture of 512 x 512 takes seconds a step here; engines for it are compared with native at that size.
SMALL = """() => { const set = (type, name, value) => app.graph.findNodesByType(type)
        .forEach(node => { node.widgets.find(w => w.name === name).value = value; });
    set('KSampler', 'steps', 2); set('EmptyLatentImage', 'width', 128); set('EmptyLatentImage', 'height', 128);
    Object.entries({ min_size: 64, opt_size: 128, max_size: 256 }).forEach(([k, v]) => set('TRTAccelerate', k, v)); }"""


@pytest.fixture(scope="module")
def full_names(comfy: ComfyProcess, models: dict[str, Path]) -> Iterator[ComfyProcess]:
    """The server, with the tiny models under the names that the template asks for."""
    made = [comfy.base / "models" / file for file in FILES]
    for path, name in zip(made, FILES.values(), strict=True):
        shutil.copyfile(models[name], path)
    shutil.copyfile(comfy.base / "input" / "control_a.png", comfy.base / "input" / "example.png")
    yield comfy
    for path in made:
        path.unlink()


@pytest.fixture(scope="module", params=slow.cases({"litegraph": False, "vue": True}, ["vue"]))
def opened(request: pytest.FixtureRequest, full_names: ComfyProcess) -> Iterator[ComfyPage]:
    with chromium() as browser, comfy_page(browser, full_names.url, vue=request.param) as page:
        yield page


@pytest.fixture
def page(opened: ComfyPage, request: pytest.FixtureRequest) -> Iterator[EnginePage]:
    yield EnginePage(opened, request.node.originalname.removeprefix("test_"))
    assert not opened.errors


@pytest.mark.slow
def test_from_an_empty_canvas_to_a_picture_on_four_engines_in_five_clicks(
    page: EnginePage, full_names: ComfyProcess
) -> None:
    shutil.rmtree(full_names.base / "models" / "trt_engines", ignore_errors=True)
    raw, clicks = page.page.page, []

    def click(target: Any, what: str) -> None:
        target.click()
        clicks.append(what)

    raw.evaluate("() => { app.graph.clear(); app.extensionManager.command.execute('Comfy.BrowseTemplates') }")
    clicks.append("templates")
    click(raw.get_by_role("dialog").last.get_by_text("hybrid-trt", exact=True).first, "the pack")
    click(raw.get_by_test_id("template-workflow-SD 1.5 - two ControlNets"), "the template")
    raw.wait_for_function("() => app.graph.nodes.some(n => n.type === 'TRTAccelerate')")
    page.page.settle()
    raw.evaluate(SMALL)
    raw.evaluate(BANNERS)
    report = page.node("TRTReport")
    build = raw.locator(".hybrid-trt-status .hybrid-trt-workflow button[data-act=build]")
    build.wait_for()
    page.shot("template")
    expect(build).to_contain_text("Build 4 missing engines")
    click(build, "Build all")
    node = page.node("TRTAccelerate")
    workflow = raw.locator(".hybrid-trt-status .hybrid-trt-workflow")
    workflow.get_by_text("Cancel all builds").wait_for()
    page.shot("building")
    assert page.wait_for(node, "ready", "failed", timeout=240)["state"] == "ready"
    workflow.get_by_text("Now: 4 engines ready").wait_for()
    before = full_names.get("/history").keys()  # a press on Build is a prompt that the history shows
    raw.evaluate("() => { window.__banners = [] }")
    click(raw.get_by_test_id("queue-button"), "Run")
    raw.wait_for_function("() => window.__banners.length > 0", timeout=240_000)  # the run is a job, and is told
    page.page.settle()
    page.shot("ran")
    (ran,) = full_names.get("/history").keys() - before
    told = full_names.get("/history")[ran]["outputs"][str(report)]
    assert told["text"][0].startswith("Accelerated: 4 of 4 models")
    raw.locator(".hybrid-trt-status").get_by_text("accelerated 4 of 4 models").first.wait_for()
    rows = told["report"][0]["rows"]
    assert sorted((row["kind"], row["engine"], row["native"]) for row in rows) == [
        ("controlnet", 2, 0), ("controlnet", 2, 0), ("unet", 2, 0), ("vae_decoder", 1, 0)]
    assert len(clicks) < 6, clicks


def test_all_builds_are_cancelled_by_one_click(page: EnginePage, full_names: ComfyProcess) -> None:
    shutil.rmtree(full_names.base / "models" / "trt_engines", ignore_errors=True)
    raw = page.page.page
    page.page.load(shipped("sd15_advanced"))
    raw.evaluate("() => app.graph.nodes.filter(n => n.type.endsWith('NetEngine')).forEach(n => {"
                 " n.widgets.find(w => w.name === 'max_images').value = 3; });")
    raw.evaluate("() => app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState()")
    raw.get_by_role("button", name="TRT engines").click()
    panel = raw.locator(".hybrid-trt-sidebar > .hybrid-trt-workflow")
    panel.locator("button[data-act=build]").click()
    engines = [page.node(name) for name in ENGINES]
    for node in engines:
        page.wait_for(node, "queued", "building", timeout=60)
    with paused(full_names.pid):
        page.shot("panel")
        # progress draws the list anew; a press that began before counts all the same
        selected = "title => Object.values(app.canvas.selected_nodes).map(n => n.title).join() === title"
        panel.locator(".hybrid-trt-workflow-node", has_text="TRT ControlNet Engine 1").hover()
        expect(panel.locator(".hybrid-trt-workflow-node").nth(1)).to_contain_text("control_v11p_sd15_canny_fp16")
        raw.mouse.down()
        raw.evaluate(DRAWN, ".hybrid-trt-sidebar .hybrid-trt-workflow-nodes")
        raw.mouse.up()
        raw.wait_for_function(selected, arg="TRT ControlNet Engine 1")
        panel.locator("button[data-act=cancel]").click()
    for node in engines:
        assert page.wait_for(node, "none", timeout=60)["state"] == "none"
    page.toast("All builds of this workflow")
    expect(raw.locator(TOAST).filter(has_text="Build cancelled")).to_have_count(1)  # one word for all of them
    panel.locator("button[data-act=build]").wait_for()  # the bar is gone: the list has moved to its place
    panel.locator(".hybrid-trt-workflow-node", has_text="TRT ControlNet Engine 2").click()
    raw.wait_for_function(selected, arg="TRT ControlNet Engine 2")
    raw.get_by_role("button", name="TRT engines").click()
