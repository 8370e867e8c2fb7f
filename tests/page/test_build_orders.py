"""Orders of the Build buttons: each use of a node, as long as its prompt is queued, and told where it is refused."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import TOAST
from build_page import MARGINS, NET_1, NET_2, opened_anew, workflow
from builds import paused, until
from comfy_process import ComfyProcess
from engine_page import PRESS_IN_REPORT, EnginePage
from playwright.sync_api import Route, expect
from workflow_to_prompt import to_prompt

pytestmark = pytest.mark.browser
#: An empty workflow in a tab of its own, and the tab that was open before.
AWAY = """async () => { window.__left = app.extensionManager.workflow.activeWorkflow;
    await app.extensionManager.command.execute('Comfy.NewBlankWorkflow'); return app.graph.nodes.length; }"""
LEFT = "() => window.__left.filename"
#: A ControlNet's engine node in a subgraph that is used for another ControlNet too, in place of that one's own node.
TWICE = """([title, another]) => { const g = app.graph, find = name => g.nodes.find(n => n.title === name);
    g.convertToSubgraph(new Set([find(title)]));
    const first = g.nodes.find(n => n.isSubgraphNode?.()), other = find(another);
    const second = LiteGraph.createNode(first.type);
    g.add(second);
    other.getInputNode(0).connect(0, second, 0);
    for (const link of [...other.outputs[0].links].map(id => g.getLink(id)))
        second.connect(0, g.getNodeById(link.target_id), link.target_slot);
    g.remove(other);
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState();
    return [first, second].map(outer => `${outer.id}:${first.subgraph.nodes[0].id}`); }"""
#: Resolves when what an element lists has been drawn again.
DRAWN = """selector => new Promise(done => { const seen = new MutationObserver(() => { seen.disconnect(); done(); });
    seen.observe(document.querySelector(selector), { childList: true, subtree: true, characterData: true }); })"""
#: A loader names a file that is gone.
GONE = """() => {
    app.graph.nodes.find(n => n.title.startsWith('Load ControlNet 2')).widgets[0].value = 'gone.safetensors';
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }"""


@contextlib.contextmanager
def busy(comfy: ComfyProcess, made: dict[str, Any], info: dict[str, Any]) -> Iterator[str]:
    """A prompt that samples until it is interrupted: those behind it wait."""
    prompt = to_prompt(made, info)
    sampler = next(node for node in prompt.values() if node["class_type"] == "KSampler")
    sampler["inputs"] |= {"steps": 10000, "seed": time.monotonic_ns() % 2**31}
    long = comfy.submit(prompt)
    try:
        assert until(lambda: comfy.get("/queue")["queue_running"], 60)
        yield long
    finally:
        comfy.post("/queue", {"clear": True})
        comfy.interrupt(long)


def pending(comfy: ComfyProcess, count: int) -> list:
    """The prompts that wait, once there are so many: the page shows an order before the server has it."""
    assert until(lambda: len(comfy.get("/queue")["queue_pending"]) == count, 60)
    return comfy.get("/queue")["queue_pending"]


def test_an_order_lasts_as_long_as_its_prompt_in_the_queue_whatever_the_page_shows_meanwhile(page: EnginePage) -> None:
    made, raw = workflow(page.info, max_size=416 if page.page.vue else 528), page.page.page
    net = opened_anew(page, made)
    with busy(page.comfy, made, page.info):
        page.click(net)
        page.wait_for(net, "asked", timeout=60)
        raw.wait_for_timeout(600)
        assert page.status(net)["state"] == "asked"
        raw.evaluate("() => app.api.clearItems('queue')")  # the page's own "Clear queue"
        page.wait_for(net, "unknown", "none", timeout=60)

        page.click(net)
        page.wait_for(net, "asked", timeout=60)
        assert raw.evaluate(AWAY) == 0
        name = raw.evaluate(LEFT)
        raw.locator(".workflow-tabs-container").get_by_text(name, exact=True).first.click()
        raw.wait_for_function("() => app.graph.nodes.length > 5")
        page.page.fit(**MARGINS)
        page.wait_for(net, "asked", timeout=60)
        page.shot("asked")
        page.click(net)  # cancels what the view before it ordered
        page.wait_for(net, "unknown", "none", timeout=60)
        assert pending(page.comfy, 0) == []


def test_a_press_on_cancel_counts_while_the_order_becomes_a_build(page: EnginePage) -> None:
    """The order is sent, or its prompt runs, as the user presses; no job is known to the page yet."""
    if page.page.vue:
        pytest.skip("The button's code is the same in both modes.")
    made, raw = workflow(page.info, max_size=544), page.page.page
    net, before = opened_anew(page, made), page.comfy.get("/hybrid_trt/builds")

    def became_a_build(route: Route) -> None:
        page.comfy.interrupt(running)
        assert until(lambda: page.comfy.get("/hybrid_trt/builds") != before, 60)
        route.continue_()

    with busy(page.comfy, made, page.info) as running:
        page.click(net)
        page.wait_for(net, "asked", timeout=60)
        pending(page.comfy, 1)
        raw.route("**/queue", became_a_build, times=1)
        page.click(net)
        page.wait_for(net, "unknown", "none", timeout=60)
    assert [job["state"] for job in page.comfy.get("/hybrid_trt/builds") if job not in before] == ["cancelled"]

    with busy(page.comfy, made, page.info):
        raw.route("**/prompt", lambda route: (page.click(net), route.continue_()), times=1)
        page.click(net)
        page.wait_for(net, "unknown", "none", timeout=60)
        assert pending(page.comfy, 0) == []


def test_each_use_of_a_subgraph_is_counted_ordered_and_cancelled(page: EnginePage) -> None:
    if page.page.vue:
        pytest.skip("The panel is the same in both modes.")
    made, raw = workflow(page.info, max_size=536), page.page.page
    opened_anew(page, made)
    uses = raw.evaluate(TWICE, [NET_1, NET_2])
    raw.get_by_role("button", name="TRT engines").click()
    view = raw.locator(".hybrid-trt-sidebar .hybrid-trt-workflow")
    with busy(page.comfy, made, page.info):
        view.get_by_role("button", name=re.compile("Build (up to )?3 missing engines")).click()
        view.get_by_text("Engines waiting to be built: 3").wait_for()
        (waiting,) = pending(page.comfy, 1)
        ordered = set(waiting[3]["hybrid_trt_build"]["nodes"])
        assert ordered > set(uses)
        assert len(ordered) == 3
        view.get_by_role("button", name="Cancel").click()
        view.get_by_text("3 of 3 engines are missing").wait_for()
        assert pending(page.comfy, 0) == []
    raw.get_by_role("button", name="TRT engines").click()


def test_all_builds_are_cancelled_by_one_click(page: EnginePage) -> None:
    raw = page.page.page
    opened_anew(page, workflow(page.info, max_images=3))
    raw.get_by_role("button", name="TRT engines").click()
    panel = raw.locator(".hybrid-trt-sidebar > .hybrid-trt-workflow")
    panel.locator("button[data-act=build]").click()
    engines = [page.node(name) for name in ("TRTUNetEngine", NET_1, NET_2)]
    for node in engines:
        page.wait_for(node, "queued", "building", timeout=60)
    selected = "title => Object.values(app.canvas.selected_nodes).map(n => n.title).join() === title"
    with paused(page.comfy.pid):
        page.shot("panel")
        # progress draws the list anew; a press that began before counts all the same
        panel.locator(".hybrid-trt-workflow-node", has_text=NET_1).hover()
        expect(panel.locator(".hybrid-trt-workflow-node").nth(1)).to_contain_text("tiny_sd15_a")
        raw.mouse.down()
        raw.evaluate(DRAWN, ".hybrid-trt-sidebar .hybrid-trt-workflow-nodes")
        raw.mouse.up()
        raw.wait_for_function(selected, arg=NET_1)
        panel.locator("button[data-act=cancel]").click()
    for node in engines:
        assert page.wait_for(node, "none", timeout=60)["state"] == "none"
    page.toast("All builds of this workflow")
    expect(raw.locator(TOAST).filter(has_text="Build cancelled")).to_have_count(1)  # one word for all of them
    panel.locator("button[data-act=build]").wait_for()  # the bar is gone: the list has moved to its place
    panel.locator(".hybrid-trt-workflow-node", has_text=NET_2).click()
    raw.wait_for_function(selected, arg=NET_2)
    raw.get_by_role("button", name="TRT engines").click()


def test_what_the_server_leaves_out_of_the_builds_of_a_workflow_is_told(page: EnginePage) -> None:
    """ComfyUI takes the rest of such a prompt and answers that all is well."""
    net = opened_anew(page, workflow(page.info, max_size=624 if page.page.vue else 632))
    lost = page.node(NET_2)
    page.page.page.evaluate(GONE)
    page.wait_until(net, lambda s: s["state"] in ("unknown", "none"), "state", 60)
    page.page.page.evaluate(PRESS_IN_REPORT)
    refused = page.wait_for(lost, "failed", timeout=60)
    page.shot("refused")
    assert "Missing file gone.safetensors: choose or download it in Load ControlNet 2" in refused["text"]
    assert refused["tone"] == "bad"
    page.wait_for(net, "asked", "queued", "building", timeout=60)
    page.page.page.evaluate(PRESS_IN_REPORT)
    page.wait_for(net, "unknown", "none", timeout=60)
    assert "gone.safetensors" in page.status(lost)["text"], "until it is built"
