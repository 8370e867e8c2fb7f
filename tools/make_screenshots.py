#!/usr/bin/env python3
"""Takes the README's pictures of the page: the shipped SD 1.5 workflow after a run with the tiny models.

    python tools/make_screenshots.py --comfyui PATH --base DIR

The base directory is a ComfyUI base directory with this pack in its custom_nodes. The first run builds the engines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from browser import ComfyPage, chromium, comfy_page
from comfy_process import ComfyProcess
from PIL import Image
from workflow_recipes import with_tiny_models
from workflow_to_prompt import to_prompt

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
NAME = "sd15_two_controlnets"
WORKFLOW = ROOT / "workflows" / "SD 1.5 - two ControlNets.json"
#: The page's own furniture, in pixels: the sidebar on the left, tabs and menu at the top, zoom controls at the bottom.
MARGINS = {"left": 72, "top": 112, "right": 12, "bottom": 60}
#: No node statistics in the corner, and no tab but that of the open workflow.
QUIET = """async () => {
    await app.extensionManager.setting.set('Comfy.Graph.CanvasInfo', false);
    await app.extensionManager.setting.set('LiteGraph.Canvas.MinFontSizeForLOD', 0);  // text at any zoom
    const store = app.extensionManager.workflow;
    for (const other of [...store.openWorkflows].filter(w => w.path !== store.activeWorkflow.path))
        await store.closeWorkflow(other); }"""


def take(page: ComfyPage, path: Path) -> None:
    """Fit the workflow into the window, wait until messages are gone, and write a small PNG."""
    page.fit(**MARGINS)
    page.page.mouse.move(800, 890)  # where no tooltip hangs
    page.page.wait_for_timeout(8000)
    page.fit(**MARGINS)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB")


def take_building(page: ComfyPage) -> None:
    """The engines panel and an engine node while it builds."""
    page.page.evaluate("""() => { const node = app.graph.nodes.find(n => n.type === 'TRTControlNetEngine');
        const button = node.widgets.find(w => w.name === 'build_engine'); button.callback(); }""")
    page.page.get_by_role("button", name="TRT engines").click()
    page.page.locator(".hybrid-trt-status[data-state=building]").first.wait_for(timeout=60000)
    page.page.evaluate("""() => { const node = app.graph.nodes.find(n => n.type === 'TRTControlNetEngine');
        app.canvas.ds.scale = 1;
        app.canvas.ds.offset = [460 - node.pos[0], 200 - node.pos[1]]; app.canvas.setDirty(true, true); }""")
    page.page.wait_for_timeout(6000)
    path = IMAGES / "building.png"
    page.page.screenshot(path=path, clip={"x": 0, "y": 38, "width": 1100, "height": 700})
    with Image.open(path) as image:
        image.convert("RGB").save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB")


def take_plot(process: ComfyProcess, workflow: dict) -> None:
    """The plot of *TRT Report* after a run in which one ControlNet has no engine."""
    prompt = to_prompt(workflow, process.object_info())
    engines = [i for i, node in prompt.items() if node["class_type"] == "TRTControlNetEngine"]
    prompt[engines[-1]]["inputs"] |= {"when_missing": "use native", "backend": "onnxruntime", "precision": "float16"}
    (report,) = (i for i, node in prompt.items() if node["class_type"] == "TRTReport")
    (sampler,) = (node for node in prompt.values() if node["class_type"] == "KSampler")
    sampler["inputs"] |= {"steps": 12, "seed": 5}
    prompt["plot"] = {"class_type": "SaveImage", "inputs": {"images": [report, 2], "filename_prefix": "plot"}}
    image = process.queue(prompt, timeout=300).output("plot", "images")[0]
    with Image.open(process.base / "output" / image["subfolder"] / image["filename"]) as picture:
        picture.convert("RGB").save(IMAGES / "report_plot.png", optimize=True)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Take the pictures of the page that the README shows.")
    parser.add_argument("--comfyui", type=Path, required=True, help="where ComfyUI's source lies")
    parser.add_argument("--base", type=Path, required=True, help="a ComfyUI base directory with this pack in it")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs ComfyUI")
    parser.add_argument("--building", action="store_true", help="a build on its node and the panel; builds an engine")
    parser.add_argument("--plot", action="store_true", help="the plot of TRT Report instead")
    parser.add_argument("--vue", action="store_true", help="with Vue nodes; the file name says so")
    options = parser.parse_args(arguments)
    subprocess.run([options.python, str(ROOT / "tools" / "tiny_models.py"), "--comfyui", str(options.comfyui),
                    "--models", str(options.base / "models"), "--input", str(options.base / "input"),
                    "tiny_sd15", "tiny_sd15_a", "tiny_sd15_b"], check=True)
    workflow = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    with (ComfyProcess(options.comfyui, options.base, options.python) as process, chromium() as browser,
          comfy_page(browser, process.url, vue=options.vue) as page):
        if options.plot:
            take_plot(process, with_tiny_models(workflow, process.object_info()))
            return
        page.load(with_tiny_models(workflow, process.object_info()), NAME)
        page.page.evaluate(QUIET)
        if options.building:
            take_building(page)
            return
        page.queue()
        if problems := page.problems():
            raise RuntimeError(f"the page has problems: {problems}")
        take(page, IMAGES / f"{NAME}{'_vue' if options.vue else ''}.png")


if __name__ == "__main__":
    main()
