"""ComfyUI's page for the tests of this folder: one browser and one page for each module, in both kinds of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import slow
from browser import ComfyPage, chromium, comfy_page
from build_page import NAME
from comfy_process import ComfyProcess
from engine_page import EnginePage
from playwright.sync_api import Browser
from shipped_workflows import shipped
from workflow_recipes import with_tiny_models


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Open pages with each kind of nodes; the quick tests see Vue nodes in modules that say so alone."""
    if "opened" in metafunc.fixturenames:
        left_out = [] if getattr(metafunc.module, "BOTH_KINDS_OF_NODES", False) else ["vue"]
        kinds = slow.cases({"litegraph": False, "vue": True}, left_out)
        metafunc.parametrize("opened", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def one_page(browser: Browser, comfy: ComfyProcess) -> Iterator[ComfyPage]:
    """One page for all tests of a module, as opening it takes long; with LiteGraph's nodes."""
    with comfy_page(browser, comfy.url) as page:
        yield page


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, one_page: ComfyPage) -> ComfyPage:
    """The page, empty, with the kind of nodes that the test is for."""
    one_page.page.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    one_page.show_as(request.param)
    return one_page


@pytest.fixture(scope="session")
def tiny(object_info: dict[str, Any]) -> dict[str, Any]:
    """The shipped workflow with a node for each engine, on the tiny models."""
    return with_tiny_models(shipped(NAME), object_info)


@pytest.fixture
def page(
    opened: ComfyPage, comfy: ComfyProcess, object_info: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[EnginePage]:
    """The page with engine nodes, with no JavaScript error on record before the test and none allowed after it."""
    opened.errors.clear()
    yield EnginePage(opened, request.node.originalname.removeprefix("test_"), comfy, object_info)
    opened.page.unroute_all(behavior="ignoreErrors")
    assert not opened.errors
