"""A headless Chromium on a ComfyUI page: loads workflows, queues them and looks at the result. Needs Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

#: No sandbox: containers run as root. The rest keeps Chromium from asking the network for things of its own.
CHROMIUM_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                      "--disable-background-networking", "--disable-component-update", "--disable-sync")
#: ComfyUI's messages and their buttons to close them: up to 1.57, and after.
TOAST = ".p-toast-message, [data-testid=toast]"
TOAST_CLOSE = ".p-toast-close-button, [data-testid=toast-close]"
READY = """() => window.app?.vueAppReady && app.isGraphReady && app.extensionManager?.spinner === false"""
#: Problems of a loaded workflow: nodes that the page does not know, and its error panel's text.
PROBLEMS = """() => [
    ...app.graph.nodes.filter(n => n.has_errors || !(n.type in LiteGraph.registered_node_types))
        .map(n => `node ${n.id} (${n.type}) has errors`),
    ...[...document.querySelectorAll("[data-testid=error-overlay]")].map(e => e.innerText.trim())]"""
QUEUE = """() => new Promise((done, failed) => {
    const end = { execution_success: () => done(app.nodeOutputs),
                  execution_error: e => failed(new Error(JSON.stringify(e.detail))),
                  execution_interrupted: () => failed(new Error("interrupted")) };
    const forget = () => Object.keys(end).forEach(name => app.api.removeEventListener(name, listeners[name]));
    const listeners = Object.fromEntries(Object.entries(end).map(([name, act]) => [name, e => { forget(); act(e); }]));
    Object.keys(end).forEach(name => app.api.addEventListener(name, listeners[name]));
    app.queuePrompt(0).then(ok => {
        if (ok === false) { forget(); failed(new Error(JSON.stringify(app.lastNodeErrors))); } }); })"""
BOXES = """() => app.graph.nodes.map(n => { const b = n.getBounding();
    return { id: Number(n.id), type: n.type, x: b[0], y: b[1], width: b[2], height: b[3] }; })"""
#: Wait until no node and no element of a widget has moved or changed its size for a tenth of a second and five frames.
STILL = """() => new Promise(done => { const begun = performance.now(); let since = begun, frames = 0, last;
    const rect = e => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; };
    const look = now => {
        const places = JSON.stringify(app.canvas.graph.nodes.map(n => [...n.pos, ...n.size,
            ...(n.widgets ?? []).map(w => [w.y, w.computedHeight, w.element ? rect(w.element) : 0]),
            ...[...document.querySelectorAll(`[data-node-id='${n.id}']`)].map(rect)]));
        if (places !== last) { last = places; since = now; frames = 0; }
        frames += 1;
        if ((frames > 5 && now - since >= 100) || now - begun >= 3000) done(); else requestAnimationFrame(look); };
    requestAnimationFrame(() => requestAnimationFrame(look)); })"""
#: Fit the view to all nodes, groups included, with a margin in pixels of the screen at each side.
FIT = """({ left, top, right, bottom }) => {
    const boxes = [...app.graph.nodes.map(n => n.getBounding()), ...app.graph.groups.map(g => [...g.pos, ...g.size])];
    const x = Math.min(...boxes.map(b => b[0])), y = Math.min(...boxes.map(b => b[1]));
    const w = Math.max(...boxes.map(b => b[0] + b[2])) - x, h = Math.max(...boxes.map(b => b[1] + b[3])) - y;
    const canvas = app.canvas.canvas.getBoundingClientRect(), free = [canvas.width - left - right,
        canvas.height - top - bottom], scale = Math.min(free[0] / w, free[1] / h);
    app.canvas.ds.scale = scale;
    app.canvas.ds.offset[0] = (left + (free[0] - w * scale) / 2) / scale - x;
    app.canvas.ds.offset[1] = (top + (free[1] - h * scale) / 2) / scale - y;
    app.canvas.setDirty(true, true); }"""


class BrowserMissing(RuntimeError):
    """There is no Chromium on this machine."""


@dataclass
class ComfyPage:
    """ComfyUI's page, ready for work. `errors` collects JavaScript exceptions that nobody caught, and a crash."""

    page: Page
    vue: bool
    errors: list[str] = field(default_factory=list)

    def show_as(self, vue: bool) -> None:
        """Choose the kind of nodes: Vue's, or LiteGraph's canvas."""
        self.vue = vue
        self.page.evaluate("vue => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', vue)", vue)
        self.page.wait_for_function("vue => LiteGraph.vueNodesMode === vue", arg=vue)

    def load(self, workflow: dict[str, Any], name: str | None = None) -> None:
        """Open a UI-format workflow in place of what is open now, and let the page lay it out."""
        self.page.evaluate("([workflow, name]) => app.loadGraphData(workflow, true, true, name)", [workflow, name])
        self.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(workflow["nodes"]))
        self.until_still()

    def until_still(self) -> None:
        """Wait until the page has drawn its nodes: sizes and positions of widgets are known only then."""
        self.page.evaluate(STILL)

    def settle(self) -> None:
        """Give the page time for what no event and no place of a node tells."""
        self.page.wait_for_timeout(400)

    def problems(self) -> list[str]:
        """Return what is wrong with the open workflow: missing nodes, its error panel, JavaScript exceptions."""
        return self.page.evaluate(PROBLEMS) + self.errors

    def prompt(self) -> dict[str, dict[str, Any]]:
        """The open workflow as the API prompt that the page would queue, without the nodes' titles."""
        prompt = self.page.evaluate("async () => (await app.graphToPrompt()).output")
        return {node: {k: v for k, v in entry.items() if k != "_meta"} for node, entry in prompt.items()}

    def widgets(self, node_type: str) -> dict[str, Any]:
        """The values of the widgets of the only node of a type, by name."""
        return self.page.evaluate("""type => Object.fromEntries(
            app.graph.nodes.find(n => n.type === type).widgets.map(w => [w.name, w.value]))""", node_type)

    def workflow(self) -> dict[str, Any]:
        """The open workflow in UI format."""
        return self.page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize()))")

    def queue(self, timeout: float = 300.0) -> dict[str, dict[str, Any]]:
        """Run the open workflow and return what its output nodes told the page, by node id.

        Raises:
            playwright.sync_api.Error: validation refused the workflow, or a node failed.
        """
        self.page.evaluate(f"() => {{ window.__run = ({QUEUE})().then(o => ({{ outputs: o }}), "
                           "e => ({ error: e.message })); window.__run.then(r => window.__ran = r); }")
        self.page.wait_for_function("() => window.__ran", timeout=timeout * 1000)
        result = self.page.evaluate("() => { const r = window.__ran; delete window.__ran; return r; }")
        if "error" in result:
            raise RuntimeError(f"the workflow did not run: {result['error']}")
        return result["outputs"]

    def boxes(self) -> list[dict[str, Any]]:
        """Return the nodes' boxes, titles included: id, type, x, y, width and height in the graph's units."""
        return self.page.evaluate(BOXES)

    def fit(self, left: int = 20, top: int = 20, right: int = 20, bottom: int = 20) -> None:
        """Zoom to the whole workflow, margins in pixels."""
        self.page.evaluate(FIT, {"left": left, "top": top, "right": right, "bottom": bottom})
        self.until_still()


@contextmanager
def chromium(*more: str) -> Iterator[Browser]:
    """The system's Chromium, headless, with ``more`` arguments. Playwright's own download is not used."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise BrowserMissing("No Chromium found: install the package 'chromium' of your system.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*CHROMIUM_ARGUMENTS, *more])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def comfy_page(browser: Browser, url: str, vue: bool = False, width: int = 1600, height: int = 900,
               video: Path | None = None) -> Iterator[ComfyPage]:
    """ComfyUI's page in a fresh browser context; `vue` chooses the Vue nodes ("Nodes 2.0") over LiteGraph's canvas.

    Nothing but the server itself can be reached. `video` is a folder for a recording.
    """
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, **({"record_video_dir": video, "record_video_size": size}
                                                    if video else {}))
    try:
        context.route(lambda to: to.startswith("http") and not to.startswith(url), lambda route: route.abort())
        page = ComfyPage(context.new_page(), vue)
        page.page.set_default_timeout(60000)
        expect.set_options(timeout=60000)
        page.page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.page.on("crash", lambda _: page.errors.append("the browser's tab crashed"))
        page.page.goto(url, wait_until="domcontentloaded")
        page.page.wait_for_function(READY, timeout=90000)
        page.show_as(vue)
        yield page
    finally:
        context.close()
