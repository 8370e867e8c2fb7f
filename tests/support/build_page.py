"""For tests of engine nodes in the page: the shipped workflow with a node for each engine, in both kinds of nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slow
from browser import ComfyPage, chromium, comfy_page
from comfy_process import ComfyProcess
from engine_page import EnginePage
from playwright.sync_api import Browser
from workflow_recipes import with_tiny_models
from workflow_to_prompt import set_widget

NAME = "sd15_advanced"
TITLE = "SD 1.5 - advanced nodes"
WORKFLOW = Path(__file__).resolve().parent.parent.parent / "workflows" / f"{TITLE}.json"
MARGINS = {"left": 72, "top": 112, "right": 12, "bottom": 60}
NET_1, NET_2 = "TRT ControlNet Engine 1", "TRT ControlNet Engine 2"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def object_info(comfy: ComfyProcess) -> dict[str, Any]:
    return comfy.object_info()


@pytest.fixture(scope="module", params=slow.cases({"litegraph": False, "vue": True}, ["vue"]))
def opened(request: pytest.FixtureRequest, browser: Browser, comfy: ComfyProcess) -> Iterator[ComfyPage]:
    with comfy_page(browser, comfy.url, vue=request.param) as page:
        yield page


@pytest.fixture(scope="module")
def page_of_both(browser: Browser, comfy: ComfyProcess) -> Iterator[ComfyPage]:
    with comfy_page(browser, comfy.url) as page:
        yield page


@pytest.fixture(scope="module", params=[False, True], ids=["litegraph", "vue"])
def opened_in_both(request: pytest.FixtureRequest, page_of_both: ComfyPage) -> ComfyPage:
    """Both kinds of nodes, in a run of the quick tests too; one page, as opening it takes long."""
    page_of_both.page.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    page_of_both.show_as(request.param)
    return page_of_both


@pytest.fixture
def page(opened: ComfyPage, request: pytest.FixtureRequest) -> Iterator[EnginePage]:
    opened.errors.clear()
    yield EnginePage(opened, request.node.originalname.removeprefix("test_"))
    opened.page.unroute_all(behavior="ignoreErrors")
    assert not opened.errors


def workflow(info: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The shipped workflow with the tiny models; nothing is built unless a button is pressed."""
    made = with_tiny_models(json.loads(WORKFLOW.read_text(encoding="utf-8")), info)
    for engine in ("TRTUNetEngine", "TRTControlNetEngine"):
        for widget, value in {"when_missing": "use native", **changes}.items():
            set_widget(made, engine, widget, value, info)
    return made


def load(page: EnginePage, made: dict[str, Any]) -> None:
    page.page.load(made, NAME)
    page.page.fit(**MARGINS)


def no_engines(comfy: ComfyProcess) -> None:
    """An empty library, known to the page."""
    shutil.rmtree(comfy.base / "models" / "trt_engines", ignore_errors=True)
