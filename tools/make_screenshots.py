#!/usr/bin/env python3
"""Take the pictures of the page that README, docs and help show, with the tiny test models, or the trained ones.

    python tools/environment.py --browser run -- python tools/make_screenshots.py [animation templates wiring ...]

Names choose some of the pictures; without a name all are taken. The first run builds three small engines.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from browser import TOAST_CLOSE, ComfyPage, chromium, comfy_page
from comfy_process import ComfyProcess
from demo_models import CFG, CHECKPOINT, CONTROLNET, edges_of, put, with_trained_models
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Locator
from workflow_recipes import with_tiny_models
from workflow_to_prompt import to_prompt

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
NAME = "SD 1.5 - two ControlNets"
WORKFLOW, ADVANCED = ROOT / "workflows" / f"{NAME}.json", ROOT / "workflows" / "SD 1.5 - advanced nodes.json"
#: Size of the window for the animation, and of the animation.
STAGE, SHOWN = (1280, 440), (960, 330)
#: The emoji of the stream, and its frames.
SWINGS, SWING = "butterfly", 16
#: The nodes that the animation shows, side by side; all others stand below.
ARRANGE = """() => {
    const at = { CheckpointLoaderSimple: [0, 0], TRTAccelerate: [360, 0], KSampler: [760, 0], TRTReport: [1090, 0],
                 SaveImage: [1510, 0] };
    let nets = 0, below = 0;
    for (const node of app.graph.nodes) {
        node.pos = at[node.type]
            ?? (node.type === 'ControlNetLoader' ? [0, 150 + 110 * nets++] : [500 * below++, 2000]); }
    app.graph.nodes.find(node => node.type === 'SaveImage').setSize([290, 380]);
    [...app.graph.groups].forEach(group => app.graph.remove(group));
    app.canvas.ds.scale = 0.66; app.canvas.ds.offset = [120, 240]; app.canvas.setDirty(true, true); }"""
#: The page's own furniture, in pixels: the sidebar on the left, tabs and menu at the top, zoom controls at the bottom.
MARGINS = {"left": 72, "top": 112, "right": 12, "bottom": 60}
#: No node statistics in the corner, and no tab but that of the open workflow.
QUIET = """async () => {
    await app.extensionManager.setting.set('Comfy.Graph.CanvasInfo', false);
    await app.extensionManager.setting.set('LiteGraph.Canvas.MinFontSizeForLOD', 0);  // text at any zoom
    const store = app.extensionManager.workflow;
    for (const other of [...store.openWorkflows].filter(w => w.path !== store.activeWorkflow.path))
        await store.closeWorkflow(other); }"""
#: The nodes of one's own workflow before and after: type, position, and links as [from, output, to, input].
WIRING = {
    "before": (
        {"checkpoint": ("CheckpointLoaderSimple", 0, 0), "net": ("ControlNetLoader", 0, 200),
         "apply": ("ControlNetApplyAdvanced", 400, 200), "sampler": ("KSampler", 800, 0)},
        (("checkpoint", 0, "sampler", "model"), ("net", 0, "apply", "control_net"),
         ("apply", 0, "sampler", "positive"), ("apply", 1, "sampler", "negative")),
    ),
    "accelerate": (
        {"checkpoint": ("CheckpointLoaderSimple", 0, 0), "net": ("ControlNetLoader", 0, 200),
         "accelerate": ("TRTAccelerate", 380, 60), "apply": ("ControlNetApplyAdvanced", 790, 240),
         "sampler": ("KSampler", 1180, 0)},
        (("checkpoint", 0, "accelerate", "model"), ("net", 0, "accelerate", "control_net_1"),
         ("accelerate", 0, "sampler", "model"), ("accelerate", 2, "apply", "control_net"),
         ("apply", 0, "sampler", "positive"), ("apply", 1, "sampler", "negative")),
    ),
    "compare": (
        {"checkpoint": ("CheckpointLoaderSimple", 0, 0), "accelerate": ("TRTAccelerate", 0, 230),
         "without": ("KSampler", 410, 0), "with": ("KSampler", 410, 340),
         "first": ("VAEDecode", 770, 0), "second": ("VAEDecode", 770, 340), "compare": ("TRTCompare", 1130, 60)},
        (("checkpoint", 0, "accelerate", "model"), ("checkpoint", 0, "without", "model"),
         ("accelerate", 0, "with", "model"), ("without", 0, "first", "samples"), ("with", 0, "second", "samples"),
         ("first", 0, "compare", "normal"), ("second", 0, "compare", "accelerated")),
    ),
    "after": (
        {"checkpoint": ("CheckpointLoaderSimple", 0, 0), "net": ("ControlNetLoader", 0, 480),
         "unet": ("TRTUNetEngine", 380, 140), "engine": ("TRTControlNetEngine", 380, 480),
         "patch": ("TRTSamplerPatch", 790, 0), "apply": ("ControlNetApplyAdvanced", 790, 480),
         "sampler": ("KSampler", 1180, 0)},
        (("checkpoint", 0, "unet", "model"), ("checkpoint", 0, "patch", "model"), ("unet", 0, "patch", "engine"),
         ("patch", 0, "sampler", "model"), ("net", 0, "engine", "control_net"),
         ("engine", 0, "apply", "control_net"), ("apply", 0, "sampler", "positive"),
         ("apply", 1, "sampler", "negative")),
    ),
}
DRAW = """([nodes, links]) => { app.graph.clear(); const made = {};
    for (const [key, [type, x, y]] of Object.entries(nodes)) {
        const node = LiteGraph.createNode(type); node.pos = [x, y]; node.size[0] = Math.max(node.size[0], 310);
        if (type === 'ControlNetLoader') node.widgets[0].value = 'tiny_sd15_a.safetensors';
        app.graph.add(node); made[key] = node; }
    for (const [from, output, to, input] of links)
        made[from].connect(output, made[to], made[to].findInputSlot(input)); }"""
#: The corners of the nodes on the screen: left, top, right, bottom.
CORNERS = """() => { const { scale, offset } = app.canvas.ds, at = app.canvas.canvas.getBoundingClientRect();
    const boxes = app.graph.nodes.map(n => n.getBounding());
    const x = v => (v + offset[0]) * scale + at.left, y = v => (v + offset[1]) * scale + at.top;
    return [x(Math.min(...boxes.map(b => b[0]))), y(Math.min(...boxes.map(b => b[1]))),
            x(Math.max(...boxes.map(b => b[0] + b[2]))), y(Math.max(...boxes.map(b => b[1] + b[3])))]; }"""
#: Where a node stands on the screen, by its title: near its upper right corner.
TOP_OF = """title => { const { scale, offset } = app.canvas.ds, at = app.canvas.canvas.getBoundingClientRect();
    const b = app.graph.nodes.find(n => n.title === title).getBounding();
    return [(b[0] + b[2] - 40 + offset[0]) * scale + at.left, (b[1] + offset[1]) * scale + at.top]; }"""


def save(page: ComfyPage, path: Path, clip: tuple[float, float, float, float] | None = None,
         numbers: dict[str, tuple[float, float]] | None = None) -> None:
    """Write a small PNG of the window, or of a part of it.

    Args:
        clip: left, top, right and bottom in pixels.
        numbers: labels of the clicks, each with the place where it is drawn.
    """
    page.page.screenshot(path=path)
    with Image.open(path) as shot:
        image = shot.convert("RGB")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(30)
    for words, (x, y) in (numbers or {}).items():
        draw.ellipse((x - 23, y - 23, x + 23, y + 23), "#ffd54a", "#202020", 3)
        draw.text((x, y), words, "#202020", font, anchor="mm")
    if clip:
        image = image.crop(tuple(round(value) for value in clip))
    image.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB")


def take_templates(page: ComfyPage) -> None:
    """The template browser with the pack's workflows."""
    page.page.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates') }")
    dialog = page.page.get_by_role("dialog").last
    dialog.get_by_text("hybrid-trt", exact=True).first.click()
    page.page.get_by_test_id(f"template-workflow-{NAME}").wait_for()
    page.page.wait_for_timeout(3000)
    box = dialog.bounding_box()
    card = page.page.get_by_test_id(f"template-workflow-{NAME}").bounding_box()
    label = dialog.get_by_text("hybrid-trt", exact=True).first.bounding_box()
    save(page, IMAGES / "templates.png", (box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]),
         {"1": (label["x"] + label["width"] + 60, label["y"] + 10), "2": (card["x"] + 30, card["y"] + 30)})
    page.page.keyboard.press("Escape")


def take_wiring(page: ComfyPage) -> None:
    """The nodes of a workflow of one's own, before and after."""
    for name, (nodes, links) in WIRING.items():
        page.page.evaluate(DRAW, [nodes, links])
        page.page.wait_for_timeout(2500)
        page.fit(**MARGINS)
        page.page.mouse.move(800, 890)
        page.page.wait_for_timeout(1500)
        left, top, right, bottom = page.page.evaluate(CORNERS)
        folder = IMAGES if name == "before" else ROOT / "js" / "docs"
        save(page, folder / f"{'wiring' if name == 'after' else name}.png",
             (left - 16, top - 24, right + 16, bottom + 16))


def take_first(page: ComfyPage, workflow: dict[str, Any]) -> None:
    """The shipped workflow after a run, with the clicks that lead to it."""
    page.load(workflow, NAME)
    page.page.evaluate(QUIET)
    page.queue()
    if problems := page.problems():
        raise RuntimeError(f"the page has problems: {problems}")
    page.fit(**MARGINS)
    page.page.mouse.move(800, 890)  # where no tooltip hangs
    page.page.wait_for_timeout(8000)  # until messages are gone
    run = page.page.get_by_test_id("queue-button").first.bounding_box()
    page.page.evaluate("() => document.activeElement?.blur()")  # its tooltip stays else
    page.page.wait_for_timeout(1000)
    save(page, IMAGES / "first_picture.png", None, {
        "3": page.page.evaluate(TOP_OF, "Load Checkpoint"), "4": page.page.evaluate(TOP_OF, "Control image 1 (edges)"),
        "5": (run["x"] - 10, run["y"] + run["height"] + 20)})


def take_building(page: ComfyPage, workflow: dict[str, Any]) -> None:
    """An engine node while it builds."""
    page.load(workflow, NAME)
    page.page.evaluate(QUIET)
    page.page.evaluate("""() => { const node = app.graph.nodes.find(n => n.type === 'TRTControlNetEngine');
        app.canvas.ds.scale = 1;
        app.canvas.ds.offset = [460 - node.pos[0], 200 - node.pos[1]]; app.canvas.setDirty(true, true); }""")
    page.page.wait_for_timeout(6000)  # until messages are gone
    page.page.evaluate("""() => { const node = app.graph.nodes.find(n => n.type === 'TRTControlNetEngine');
        const button = node.widgets.find(w => w.name === 'build_engine'); button.callback(); }""")
    progress = page.page.locator(".hybrid-trt-status[data-state=building]").get_by_text(re.compile(r"[2-9]\d %")).first
    progress.wait_for(timeout=60000)
    page.settle()  # its bar moves there
    save(page, IMAGES / "building.png", (440, 150, 850, 480))


def take_plot(process: ComfyProcess, workflow: dict[str, Any]) -> None:
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


def take_animation(page: ComfyPage, workflow: dict[str, Any]) -> None:
    """All engines are built by a press, with their bar, and the workflow runs on them."""
    raw, frames, lasting = page.page, [], []

    def frame(milliseconds: int, pressed: Locator | None = None) -> None:
        raw.evaluate("all => document.querySelectorAll(all).forEach(close => close.click())", TOAST_CLOSE)
        with Image.open(io.BytesIO(raw.screenshot())) as shot:
            image = shot.convert("RGB")
        if pressed:
            box = pressed.bounding_box()
            x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            ImageDraw.Draw(image).ellipse((x - 22, y - 22, x + 22, y + 22), None, "#ffd54a", 5)
        frames.append(image.resize(SHOWN, Image.Resampling.LANCZOS))
        lasting.append(milliseconds)

    def press(button: Locator, until: str) -> None:
        frame(900, button)
        button.click()
        for _ in range(200):
            raw.wait_for_timeout(1000)
            frame(120)
            if raw.locator(".hybrid-trt-status").get_by_text(until).count():
                break

    raw.set_viewport_size({"width": STAGE[0], "height": STAGE[1]})
    page.load(workflow, NAME)
    raw.evaluate(QUIET)
    raw.evaluate(ARRANGE)
    raw.wait_for_timeout(2500)
    frame(1500)
    press(raw.locator(".hybrid-trt-status .hybrid-trt-workflow button[data-act=build]").first, "engines ready")
    frame(1500)
    press(raw.get_by_test_id("queue-button"), "Last run:")
    raw.wait_for_timeout(3000)
    frame(4000)
    raw.set_viewport_size({"width": 1600, "height": 900})
    path = IMAGES / "build_and_run.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=lasting, loop=0, quality=50, method=6)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB, {len(frames)} frames")


def take_stream(process: ComfyProcess, info: dict[str, Any]) -> None:
    """Edges that swing, and the pictures of them, frame by frame, by the trained models."""
    with Image.open(process.base / "input" / edges_of(SWINGS)) as file:
        edges = file.convert("RGB")
    turns = [20 * math.sin(2 * math.pi * number / SWING) for number in range(SWING)]
    frames = [edges.rotate(turn, Image.Resampling.BICUBIC) for turn in turns]
    frames[0].save(process.base / "input" / "stream.webp", save_all=True, append_images=frames[1:], lossless=True)

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        asked = info[kind]["input"]["required"]
        usual = {name: spec[1]["default"] for name, spec in asked.items() if "default" in (spec[1:] or [{}])[0]}
        return {"class_type": kind, "inputs": usual | inputs}

    sizes = dict.fromkeys(("min_size", "opt_size", "max_size"), edges.width)
    prompt = {
        "model": node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT),
        "net": node("ControlNetLoader", control_net_name=CONTROLNET),
        "engines": node("TRTAccelerate", model=["model", 0], vae=["model", 2], control_net_1=["net", 0],
                        when_missing="build now", **sizes),
        "prompt": node("CLIPTextEncode", clip=["model", 1], text=SWINGS),
        "nothing": node("CLIPTextEncode", clip=["model", 1], text=""),
        "frames": node("LoadImage", image="stream.webp"),
        "apply": node("ControlNetApplyAdvanced", positive=["prompt", 0], negative=["nothing", 0], vae=["engines", 1],
                      control_net=["engines", 2], image=["frames", 0]),
        "stream": node("TRTStream", model=["engines", 0], vae=["engines", 1], positive=["apply", 0],
                       negative=["apply", 1], frames=["frames", 0], control_images="the frame", steps=8, cfg=CFG,
                       sampler_name="dpmpp_2m", scheduler="karras", denoise=1.0, seed=3),
        "save": node("SaveImage", images=["stream", 0], filename_prefix="stream"),
    }  # fmt: skip
    made, both = process.queue(prompt, timeout=400).output("save", "images"), []
    for frame, image in zip(frames, made, strict=True):
        both.append(Image.new("RGB", (2 * edges.width, edges.height)))
        both[-1].paste(frame, (0, 0))
        with Image.open(process.base / "output" / image["subfolder"] / image["filename"]) as picture:
            both[-1].paste(picture.convert("RGB"), (edges.width, 0))
    path = IMAGES / "stream.webp"
    both[0].save(path, save_all=True, append_images=both[1:], duration=120, loop=0, quality=80, method=6)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB, {len(both)} frames")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    everything = ("animation", "templates", "wiring", "first", "building", "plot", "stream")  # it begins before any run
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", help=f"some of {', '.join(everything)} (default: all)")
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("HYBRID_TRT_COMFYUI"), help="ComfyUI's source")
    parser.add_argument("--base", type=Path, default=os.environ.get("HYBRID_TRT_BASE"),
                        help="a ComfyUI base directory with this pack in it")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs ComfyUI")
    options = parser.parse_args(arguments)
    wanted = options.pictures or everything
    subprocess.run([options.python, str(ROOT / "tools" / "tiny_models.py"), "--comfyui", str(options.comfyui),
                    "--models", str(options.base / "models"), "--input", str(options.base / "input"),
                    "tiny_sd15", "tiny_sd15_a", "tiny_sd15_b"], check=True)
    put(options.comfyui, options.base)
    with (ComfyProcess(options.comfyui, Path(options.base), options.python) as process, chromium() as browser,
          comfy_page(browser, process.url) as page):
        info = process.object_info()
        shipped, advanced = (json.loads(path.read_text(encoding="utf-8")) for path in (WORKFLOW, ADVANCED))
        advanced = with_tiny_models(advanced, info)
        page.page.evaluate(QUIET)
        for name, take in (("animation", lambda: take_animation(page, with_trained_models(shipped, info))),
                           ("templates", lambda: take_templates(page)), ("wiring", lambda: take_wiring(page)),
                           ("first", lambda: take_first(page, with_trained_models(shipped, info))),
                           ("building", lambda: take_building(page, advanced)),
                           ("plot", lambda: take_plot(process, advanced)),
                           ("stream", lambda: take_stream(process, info))):
            if name in wanted:
                if name == "animation":
                    shutil.rmtree(process.base / "models" / "trt_engines", ignore_errors=True)
                take()


if __name__ == "__main__":
    main()
