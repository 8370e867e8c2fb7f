"""The cost of the pack's page in the browser: measured by Chromium's own profiler, in milliseconds of each second."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from browser import ComfyPage, chromium, comfy_page
from comfy_process import ComfyProcess
from shipped_workflows import shipped
from workflow_recipes import with_tiny_models

pytestmark = pytest.mark.browser

SECONDS = 4
OURS = "/extensions/hybrid-trt/"
SHARE = 0.05
"""Of what the page does: on a slow machine the same work takes more milliseconds, all of it alike."""
#: Drags a node about and turns a number, as a hand does: sixty moves and ten edits each second.
EDITS = """seconds => new Promise(done => {
    const node = app.graph.nodes.find(n => n.type === 'KSampler'), steps = node.widgets.find(w => w.name === 'steps');
    const begun = performance.now();
    let frame = 0;
    const move = () => {
        node.pos[0] += Math.sin(frame / 10);
        app.canvas.setDirty(true, true);
        if (frame++ % 6 === 0) { steps.value = 5 + frame % 20;
            app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }
        performance.now() - begun < 1000 * seconds ? setTimeout(move, 16) : done();
    };
    move(); })"""


@pytest.fixture(scope="module", params=[False, True], ids=["litegraph", "vue"])
def page(request: pytest.FixtureRequest, comfy: ComfyProcess) -> Iterator[ComfyPage]:
    with chromium() as browser, comfy_page(browser, comfy.url, vue=request.param) as opened:
        opened.load(copy.deepcopy(with_tiny_models(shipped("sd15_controlnet_stack"), comfy.object_info())))
        opened.page.wait_for_timeout(2000)
        yield opened
        assert not opened.errors


def work(page: ComfyPage, act: str) -> dict[str, float]:
    """Milliseconds of each second in the pack's own code, and in all code, while the page does something."""
    session = page.page.context.new_cdp_session(page.page)
    session.send("Profiler.enable")
    session.send("Profiler.setSamplingInterval", {"interval": 200})
    session.send("Profiler.start")
    page.page.evaluate(act, SECONDS)
    profile: dict[str, Any] = session.send("Profiler.stop")["profile"]
    session.detach()
    url = {node["id"]: node["callFrame"]["url"] for node in profile["nodes"]}
    name = {node["id"]: node["callFrame"]["functionName"] for node in profile["nodes"]}
    spent = {"ours": 0.0, "all": 0.0}
    for node, microseconds in zip(profile["samples"], profile["timeDeltas"], strict=True):
        if name[node] not in ("(idle)", "(program)"):
            spent["all"] += microseconds / 1000 / SECONDS
        if OURS in url[node]:
            spent["ours"] += microseconds / 1000 / SECONDS
    return spent


def test_an_idle_page_spends_less_than_a_millisecond_a_second_in_the_packs_code(
    page: ComfyPage, record_property: Any
) -> None:
    spent = work(page, "seconds => new Promise(done => setTimeout(done, 1000 * seconds))")
    record_property("milliseconds a second", spent)
    assert spent["ours"] < 1, spent


def test_editing_spends_less_than_twentyfive_milliseconds_a_second_or_a_twentieth_of_it_in_the_packs_code(
    page: ComfyPage, record_property: Any
) -> None:
    spent = work(page, EDITS)
    record_property("milliseconds a second", spent)
    assert 0 < spent["ours"] < max(25, SHARE * spent["all"]), spent
