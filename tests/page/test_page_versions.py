"""The oldest and the newest page that are supported: shipped workflows on the oldest, saved workflows on both."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slow
from browser import ComfyPage, comfy_page
from comfy_process import ComfyProcess
from engine_page import EnginePage
from node_boxes import overlaps
from playwright.sync_api import Browser
from shipped_workflows import IN_PAGES, NAMES, shipped
from workflow_recipes import with_tiny_models
from workflow_to_prompt import to_prompt

pytestmark = pytest.mark.browser
NETS = {name: ("tiny_sdxl_a", "tiny_sdxl_b") if name.startswith("sdxl") else ("tiny_sd15_a", "tiny_sd15_b")
        for name in NAMES}
FOLDER = "HYBRID_TRT_OLDEST_FRONTEND"
VUE = {"litegraph": False, "vue": True}
#: Values of an engine node that are not those of a new one.
OWN = {"when_missing": "build now", "min_size": 256, "opt_size": 512, "max_size": 768, "max_images": 2,
       "max_tokens": 77, "precision": "float32", "backend": "onnxruntime", "weights": "replaceable"}
SET = """values => {
    const set = app.graph.nodes.find(n => n.type === 'TRTUNetEngine').widgets.filter(w => w.name in values);
    for (const widget of set) widget.value = values[widget.name];
    for (const widget of set) widget.callback?.(widget.value); }"""


@pytest.fixture(scope="module")
def oldest(environment: Any, comfy: ComfyProcess) -> Iterator[ComfyProcess]:
    """A second server over the same folders, with the oldest page."""
    folder = os.environ.get(FOLDER)
    if not folder:
        pytest.fail(f"{FOLDER} is not set: run the tests with 'make test', which fetches that page.")
    with ComfyProcess(environment.comfyui, environment.base, arguments=["--front-end-root", folder],
                      log=environment.base / "oldest_page.log") as process:
        yield process


@pytest.fixture(scope="module")
def of_oldest(browser: Browser, oldest: ComfyProcess) -> Iterator[ComfyPage]:
    with comfy_page(browser, oldest.url) as page:
        html = page.page.evaluate("async () => (await fetch('/')).text()")
        assert html == (Path(os.environ[FOLDER]) / "index.html").read_text(encoding="utf-8")
        yield page


@pytest.fixture(scope="module", params=VUE)
def oldest_page(request: pytest.FixtureRequest, of_oldest: ComfyPage) -> ComfyPage:
    of_oldest.show_as(VUE[request.param])
    return of_oldest


@pytest.fixture(scope="module", params=slow.cases(
    {f"{age}-{kind}": f"{age}-{kind}" for age in ("oldest", "newest") for kind in VUE},
    ["oldest-vue", "newest-litegraph"]))
def page(request: pytest.FixtureRequest) -> ComfyPage:
    age, kind = request.param.split("-")
    opened: ComfyPage = request.getfixturevalue("of_oldest" if age == "oldest" else "one_page")
    opened.show_as(VUE[kind])
    return opened


def engine_values(page: ComfyPage) -> dict[str, Any]:
    """The UNet engine node's own settings, as the page has them."""
    return {name: value for name, value in page.widgets("TRTUNetEngine").items() if name in OWN}


@slow.when("vue", but=["sd15_two_controlnets"])
@slow.when("litegraph", but=["sd15_advanced", "sdxl_two_controlnets"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_a_template_opens_converts_and_is_saved_on_the_oldest_page(
    oldest_page: ComfyPage, comfy: ComfyProcess, name: str
) -> None:
    if oldest_page.vue and name != NAMES[0]:
        pytest.skip("How boxes are measured differs between the kinds of nodes, and one template shows it.")
    info = comfy.object_info()
    workflow = with_tiny_models(shipped(name), info, NETS[name])
    oldest_page.load(copy.deepcopy(workflow))
    oldest_page.page.wait_for_timeout(600)  # the error panel takes its time
    assert oldest_page.problems() == []
    assert overlaps(oldest_page.boxes()) == []
    prompt = oldest_page.prompt()
    assert prompt == to_prompt(workflow, info)
    oldest_page.load(oldest_page.workflow())
    assert oldest_page.prompt() == prompt


@pytest.mark.slow
def test_engines_are_built_by_a_click_and_run_on_the_oldest_page(oldest_page: ComfyPage, sd15: ComfyProcess) -> None:
    info, nodes = sd15.object_info(), EnginePage(oldest_page, "oldest")
    (unets,) = (sd15.base / "models" / "trt_engines").glob("sd15_unet-*")
    shutil.rmtree(unets)
    oldest_page.load(with_tiny_models(shipped("sd15_advanced"), info))
    oldest_page.fit(left=72, top=112, right=12, bottom=60)
    engine = nodes.node("TRTUNetEngine")
    nodes.click(engine)
    assert nodes.wait_for(engine, "ready", "failed", timeout=240)["state"] == "ready"
    outputs = oldest_page.queue()
    rows = [row for output in outputs.values() if "report" in output for row in output["report"][0]["rows"]]
    assert all(row["engine"] > 0 and row["native"] == 0 for row in rows), rows
    assert len({row["name"] for row in rows}) == 3
    nodes.shot("ran")
    assert not oldest_page.errors


def test_what_is_saved_opens_with_each_value_at_its_place(page: ComfyPage, comfy: ComfyProcess) -> None:
    """Saved by either page, also after it was opened and saved once more."""
    workflow = with_tiny_models(shipped("sd15_advanced"), comfy.object_info())
    page.load(workflow)
    page.page.evaluate(SET, OWN)
    page.settle()
    before, prompt = engine_values(page), page.prompt()
    assert before.items() >= OWN.items()
    for _ in range(2):
        page.load(page.workflow())
        assert engine_values(page) == before
        assert page.prompt() == prompt
