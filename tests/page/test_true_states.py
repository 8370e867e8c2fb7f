"""States that are true: each is provoked in a real ComfyUI, and read where a person reads it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browser import ComfyPage
from build_page import NET_1, NET_2, load, workflow
from comfy_process import ComfyProcess
from engine_page import PRESS_IN_REPORT, EnginePage
from workflow_to_prompt import set_widget

pytestmark = pytest.mark.browser
SIDE = 144
"""Pixels of the picture; the first ControlNet's engine is for smaller ones alone."""
CUT = """id => { const node = app.graph.getNodeById(id), [link] = node.outputs[0].links;
    const { target_id, target_slot } = app.graph.getLink(link);
    node.disconnectOutput(0);
    return [String(target_id), target_slot]; }"""
OURS = {"X-Hybrid-TRT": "1"}
DELETE_ALL = """async () => { const headers = { 'X-Hybrid-TRT': '1' };
    const { engines } = await (await app.api.fetchApi('/hybrid_trt/engines', { headers })).json();
    for (const { name } of engines)
        await app.api.fetchApi(`/hybrid_trt/engines/${name}`, { method: 'DELETE', headers }); }"""
WIRE = "([id, to, slot]) => app.graph.getNodeById(id).connect(0, app.graph.getNodeById(to), slot)"
SET = """([id, name, value]) => { const widget = app.graph.getNodeById(id).widgets.find(w => w.name === name);
    widget.value = value; widget.callback?.(value);
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }"""
#: The headline of a node's box, its lines that are not folded away, and what the report says of the workflow now.
SAID = """id => { const box = app.graph.getNodeById(id).widgets
        .find(w => ['engine_status', 'run_text'].includes(w.name)).element;
    return { title: box.querySelector('.hybrid-trt-title').textContent,
             lines: [...box.querySelector('.hybrid-trt-content > .hybrid-trt-lines').children].map(e => e.textContent),
             now: box.querySelector('.hybrid-trt-workflow > .hybrid-trt-title')?.textContent }; }"""


@pytest.fixture(scope="module")
def built(opened: ComfyPage, sd15: ComfyProcess, object_info: dict[str, Any]) -> EnginePage:
    """A page with engines for all of a workflow, but that the first ControlNet's is too small for the picture."""
    for manifest in (sd15.base / "models" / "trt_engines").glob("*/manifest.json"):
        if "tiny_sd15_a" in manifest.read_text(encoding="utf-8"):
            shutil.rmtree(manifest.parent)
    made = workflow(object_info)
    for widget, value in (("width", SIDE), ("height", SIDE)):
        set_widget(made, "EmptyLatentImage", widget, value, object_info)
    set_widget(made, NET_1, "max_size", 128, object_info)
    set_widget(made, "KSampler", "steps", 2, object_info)
    page = EnginePage(opened, "true_states", sd15, object_info)
    load(page, copy.deepcopy(made))
    page.wait_for(page.node(NET_1), "unknown", "none", timeout=60)
    opened.page.evaluate(PRESS_IN_REPORT)
    page.wait_for(page.node(NET_1), "queued", "building", timeout=60)
    for title in ("TRTUNetEngine", NET_1, NET_2):
        assert page.wait_for(page.node(title), "ready", "failed")["state"] == "ready"
    return page


@pytest.fixture
def page(built: EnginePage) -> Iterator[EnginePage]:
    built.page.errors.clear()
    yield built
    assert not built.page.errors


def test_an_engine_node_whose_output_goes_nowhere_says_that_it_is_not_connected(page: EnginePage) -> None:
    raw, net = page.page.page, page.node(NET_2)
    before = page.status(net)["title"]
    assert before.startswith("Ready"), "whatever ran on this server before"
    to = raw.evaluate(CUT, net)
    told = page.wait_until(net, lambda s: s["title"] == "Not connected", "word of that", 60)
    page.shot("not-connected")
    assert told["tone"] == "warn"
    assert raw.evaluate(SAID, net)["lines"][0].startswith("Its output goes nowhere")
    raw.evaluate(WIRE, [net, *to])
    page.wait_until(net, lambda s: s["title"] == before, "word of that", 60)


def test_a_build_that_the_disk_limit_refuses_is_told_first_though_an_older_engine_is_there(page: EnginePage) -> None:
    raw, net = page.page.page, page.node(NET_2)
    page.comfy.post("/hybrid_trt/settings", {"limit_gb": 1e-6}, headers=OURS)
    try:
        page.click(net)
        page.wait_until(net, lambda s: s["title"] == "Ready, but not built again", "refusal", 60)
    finally:
        page.comfy.post("/hybrid_trt/settings", {"limit_gb": 0}, headers=OURS)
    page.shot("refused")
    assert "the settings allow" in raw.evaluate(SAID, net)["lines"][0]
    assert page.status(net)["tone"] == "warn"
    assert page.status(net)["state"] == "ready", "the older engine runs on"


def test_what_the_next_run_does_for_a_picture_that_does_not_fit_is_what_it_then_does(page: EnginePage) -> None:
    raw, net, size = page.page.page, page.node(NET_1), f"{SIDE}×{SIDE} does not fit this engine: "

    def says(words: str) -> dict[str, Any]:
        return page.wait_until(net, lambda s: words in s["text"], words, 120)

    says(f"{size}it will run at normal speed")
    raw.evaluate(SET, [net, "when_missing", "build now"])
    page.page.settle()
    assert f"{size}it will run at normal speed" in page.status(net)["text"], "its settings take no such picture"
    raw.evaluate(SET, [net, "when_missing", "use native"])
    raw.evaluate(SET, [net, "max_size", SIDE])
    raw.get_by_test_id("queue-button").click()
    assert says("Last run: not accelerated")["state"] == "ready", "its engine is there, for smaller pictures"
    says(f"{size}it will run at normal speed")
    page.shot("runs-normally")
    raw.evaluate(SET, [net, "when_missing", "build in background"])
    says(f"{size}the next run starts a build for it")
    raw.evaluate(SET, [net, "when_missing", "build now"])
    says(f"{size}the next run builds one for it first")
    page.shot("builds-first")
    raw.get_by_test_id("queue-button").click()
    ran = says("Last run: 2 of 2 calls accelerated")
    page.page.settle()
    page.shot("ran")
    assert "does not fit" not in ran["text"]

    # the last run is told apart from what there is now
    report, patch = page.node("TRTReport"), page.node("TRTSamplerPatch")
    said = raw.evaluate(SAID, report)
    assert said["title"].startswith("Last run: accelerated 3 of 3 models")
    assert said["now"] == "Now: 3 engines ready"
    assert raw.evaluate(SAID, patch)["title"] == "Model accelerated"
    raw.evaluate(DELETE_ALL)
    raw.wait_for_function(f"id => ({SAID})(id).now === 'Now: 3 of 3 engines are missing'", arg=report)
    page.shot("deleted")
    assert raw.evaluate(SAID, report)["title"] == said["title"]
