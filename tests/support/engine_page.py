"""Steps of a user of the pack in ComfyUI's page, with real clicks, and what he then sees."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from browser import READY, TOAST, TOAST_CLOSE, ComfyPage
from comfy_process import ComfyProcess
from playwright.sync_api import Locator

SHOTS = os.environ.get("HYBRID_TRT_SHOTS")
"""Folder for pictures of the page; they take up to a second each, so there are none without it."""
#: Return the middle of a widget on the screen.
PLACE = """([id, name]) => { const node = app.canvas.graph.getNodeById(id);
    const widget = node.widgets.find(w => w.name === name);
    const height = widget.computedHeight || LiteGraph.NODE_WIDGET_HEIGHT;
    return app.canvasPosToClientPos([node.pos[0] + node.size[0] / 2, node.pos[1] + widget.y + height / 2]); }"""
#: Return whether a message of ComfyUI's lies over a point; then close all, as a person would, for others slide up.
COVERED = f"""([x, y]) => {{ const covered = Boolean(document.elementFromPoint(x, y)?.closest('{TOAST}'));
    if (covered) document.querySelectorAll('{TOAST_CLOSE}').forEach(button => button.click());
    return covered; }}"""
#: Return whether the stack's height is final. Older pages give Vue nodes the height of their boxes some time after
#: they were drawn; newer ones, which know a widget's visibility, leave the node its own.
STACK_MEASURED = """() => { const node = app.graph.nodes.find(n => n.type === 'TRTApplyControlNet');
    const box = document.querySelector(`[data-node-id='${node.id}']`);
    return !LiteGraph.vueNodesMode || (box && 'visibility' in node.widgets[0])
        || Math.abs(box?.offsetHeight - LiteGraph.NODE_TITLE_HEIGHT - node.size[1]) < 1; }"""
#: Return what the status of an engine node of the open graph shows.
STATUS = """id => { const widget = app.canvas.graph.getNodeById(id).widgets.find(w => w.name === 'engine_status');
    const e = widget.element, bar = e.querySelector('.hybrid-trt-bar');
    return { state: e.dataset.state, tone: e.dataset.tone,
             text: `${e.innerText}\n${e.querySelector('.hybrid-trt-details').textContent}`, // what is folded away too
             title: e.querySelector('.hybrid-trt-title').textContent, shown: e.isConnected && e.offsetHeight > 0,
             width: bar.hidden ? null : parseFloat(bar.firstChild.style.width),
             button: app.canvas.graph.getNodeById(id).widgets.find(w => w.name === 'build_engine').label }; }"""

#: The one button for all engines of the workflow: it builds what is missing, or cancels all builds.
PRESS_IN_REPORT = """() => app.graph.nodes.find(n => n.type === 'TRTReport').widgets.find(w => w.name === 'run_text')
    .element.querySelector('.hybrid-trt-workflow button').click()"""


@dataclass
class EnginePage:
    """An open page with engine nodes in it, its server, and what that says of nodes. ``steps`` names the pictures."""

    page: ComfyPage
    name: str
    comfy: ComfyProcess | None = None
    info: dict[str, Any] = field(default_factory=dict)
    steps: list[Path] = field(default_factory=list)

    def node(self, title: str) -> int:
        """The id of the node with a title, or of a type."""
        return self.page.page.evaluate(
            "name => app.graph.nodes.find(n => n.title === name || n.type === name).id", title)

    def click(self, node: int, widget: str = "build_engine") -> None:
        """Click a widget of a node with the mouse."""
        if self.page.vue:
            label = self.status(node)["button"]
            self.page.page.locator(f"[data-node-id='{node}']").get_by_role("button", name=label).click()
        else:
            self._click_at(*self.page.page.evaluate(PLACE, [node, widget]))

    def click_in_status(self, node: int, selector: str) -> None:
        """Click something inside a node's status with the mouse."""
        x, y = self.page.page.evaluate("""([id, selector]) => { const r = app.canvas.graph.getNodeById(id).widgets
            .find(w => w.name === 'engine_status').element.querySelector(selector).getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }""", [node, selector])
        self._click_at(x, y)

    def _click_at(self, x: float, y: float) -> None:
        if self.page.page.evaluate(COVERED, [x, y]):
            self.page.page.wait_for_function("toast => !document.querySelector(toast)", arg=TOAST)
        self.page.page.mouse.click(x, y)

    def status(self, node: int) -> dict[str, Any]:
        return self.page.page.evaluate(STATUS, node)

    def wait_for(self, node: int, *states: str, timeout: float = 120) -> dict[str, Any]:
        """Wait until a node shows one of some states."""
        return self.wait_until(node, lambda status: status["state"] in states, f"one of {states}", timeout)

    def wait_until(self, node: int, wanted: Any, what: str, timeout: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not wanted(status := self.status(node)):
            assert time.monotonic() < deadline, f"no {what} within {timeout} s, but {status}"
            self.page.page.wait_for_timeout(100)
        return status

    def toast(self, text: str) -> Locator:
        """The message with some text; waits for it."""
        found = self.page.page.locator(TOAST).filter(has_text=re.compile(text)).first
        found.wait_for()
        return found

    def shot(self, step: str) -> None:
        """Keep a picture of the page, where somebody wants pictures."""
        if not SHOTS:
            return
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        mode = "vue" if self.page.vue else "litegraph"
        path = Path(SHOTS) / f"{self.name}-{mode}-{len(self.steps)}-{step}.png"
        self.page.page.screenshot(path=path)
        self.steps.append(path)


def choose(page: EnginePage, group: Locator, entry: str) -> None:
    """Open the menu of a model's only engine in the panel, and click an entry."""
    group.get_by_role("button", name="More for").click()
    page.page.page.get_by_role("menu").get_by_role("menuitem", name=entry).click()


def reload(page: EnginePage) -> None:
    """The page anew, as after a change of its language."""
    raw = page.page.page
    raw.reload(wait_until="domcontentloaded")
    raw.wait_for_function(READY, timeout=90000)
    raw.wait_for_function("vue => LiteGraph.vueNodesMode === vue", arg=page.page.vue)
