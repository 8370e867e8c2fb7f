"""A stock workflow in the page: one menu entry accelerates it, one press builds, and the picture stays the same."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
import slow
from build_page import no_engines
from comfy_process import ComfyProcess
from engine_page import EnginePage
from PIL import Image
from workflow_to_prompt import to_prompt

pytestmark = pytest.mark.browser

#: Stock workflows as type, position and widgets of each node, and links as [from, output, to, input].
PROMPTS = {
    "checkpoint": ("CheckpointLoaderSimple", 0, 0, {"ckpt_name": "tiny_sd15.safetensors"}),
    "positive": ("CLIPTextEncode", 380, 0, {"text": "a house"}),
    "negative": ("CLIPTextEncode", 380, 260, {"text": "blurry"}),
    "latent": ("EmptyLatentImage", 380, 520, {"width": 128, "height": 128}),
    "sampler": ("KSampler", 820, 0, {"seed": 3, "control_after_generate": "fixed", "steps": 2, "cfg": 5.0}),
    "decode": ("VAEDecode", 1500, 0, {}),
    "save": ("SaveImage", 1760, 0, {"filename_prefix": "accelerate"}),
}
PLAIN = (PROMPTS, [
    ["checkpoint", 0, "sampler", "model"], ["checkpoint", 1, "positive", "clip"], ["checkpoint", 1, "negative", "clip"],
    ["positive", 0, "sampler", "positive"], ["negative", 0, "sampler", "negative"],
    ["latent", 0, "sampler", "latent_image"], ["sampler", 0, "decode", "samples"],
    ["checkpoint", 2, "decode", "vae"], ["decode", 0, "save", "images"],
])  # fmt: skip
SDXL = {"width": 2048, "pooled": 1280, "control_after_generate": "fixed"}
LARGE = ({name: PROMPTS[name] for name in ("latent", "sampler", "decode", "save")} | {
    "model": ("UNETLoader", 0, 0, {"unet_name": "tiny_sdxl_unet.safetensors"}),
    "vae": ("VAELoader", 0, 130, {"vae_name": "tiny_sdxl_taesd.safetensors"}),
    "positive": ("TestConditioning", 380, 0, SDXL | {"seed": 1}),
    "negative": ("TestConditioning", 380, 260, SDXL | {"seed": 2}),
    "lora": ("LoraLoaderModelOnly", 380, -260, {"lora_name": "tiny_sdxl_lora.safetensors"}),
    "net_1": ("ControlNetLoader", 0, 260, {"control_net_name": "tiny_sdxl_a.safetensors"}),
    "net_2": ("ControlNetLoader", 0, 400, {"control_net_name": "tiny_sdxl_b.safetensors"}),
    "image": ("LoadImage", 0, 540, {"image": "control_a.png"}),
    "apply_1": ("ControlNetApplyAdvanced", 820, 300, {"strength": 0.7}),
    "apply_2": ("ControlNetApplyAdvanced", 820, 560, {"strength": 0.4}),
    "second": ("KSampler", 1160, 340, {"seed": 4, "control_after_generate": "fixed", "steps": 2, "denoise": 0.5}),
}, [
    ["model", 0, "lora", "model"], ["lora", 0, "sampler", "model"], ["lora", 0, "second", "model"],
    ["positive", 0, "apply_1", "positive"], ["negative", 0, "apply_1", "negative"],
    ["net_1", 0, "apply_1", "control_net"], ["image", 0, "apply_1", "image"],
    ["apply_1", 0, "apply_2", "positive"], ["apply_1", 1, "apply_2", "negative"],
    ["net_2", 0, "apply_2", "control_net"], ["image", 0, "apply_2", "image"],
    ["apply_2", 0, "sampler", "positive"], ["apply_2", 1, "sampler", "negative"],
    ["apply_2", 0, "second", "positive"], ["apply_2", 1, "second", "negative"],
    ["latent", 0, "sampler", "latent_image"], ["sampler", 0, "second", "latent_image"],
    ["second", 0, "decode", "samples"], ["vae", 0, "decode", "vae"], ["decode", 0, "save", "images"],
])  # fmt: skip
DRAW = """([nodes, links]) => { app.graph.clear(); const made = {};
    for (const [key, [type, x, y, widgets]] of Object.entries(nodes)) {
        const node = LiteGraph.createNode(type); node.pos = [x, y]; app.graph.add(node); made[key] = node;
        for (const [name, value] of Object.entries(widgets)) node.widgets.find(w => w.name === name).value = value; }
    for (const [from, output, to, input] of links)
        made[from].connect(output, made[to], made[to].findInputSlot(input));
    const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker;
    tracker.captureCanvasState(); tracker.reset?.(); }"""
#: Who is wired to whom, by titles, without what stands where.
WIRES = """() => { const graph = app.rootGraph ?? app.graph, title = id => graph.getNodeById(id).title;
    return [...graph.links.values()].map(l =>
        [title(l.origin_id), l.origin_slot, title(l.target_id), l.target_slot].join(' ')).sort(); }"""
OVERLAPS = """() => { const boxes = app.graph.nodes.map(n => [n.title, ...n.getBounding()]);
    return boxes.flatMap(([a, x, y, w, h], i) => boxes.slice(i + 1).filter(([, u, v, p, q]) =>
        x < u + p && u < x + w && y < v + q && v < y + h).map(([b]) => `${a} / ${b}`)); }"""
#: A free place of the canvas, in the middle of its lower edge.
FREE = "() => { const r = app.canvas.canvas.getBoundingClientRect(); return [r.left + r.width / 2, r.bottom - 90]; }"
MARGINS = {"left": 420, "top": 112, "right": 12, "bottom": 160}


@pytest.fixture
def page(page: EnginePage, comfy: ComfyProcess) -> EnginePage:
    """An empty page of a server without engines."""
    no_engines(comfy)
    page.page.page.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    return page


def picture(page: EnginePage, comfy: ComfyProcess) -> numpy.ndarray:
    """Run the workflow and return its picture."""
    page.page.queue()
    outputs = page.page.page.evaluate("() => Object.values(app.nodeOutputs).find(o => o.images).images")
    with Image.open(comfy.base / "output" / outputs[0]["subfolder"] / outputs[0]["filename"]) as image:
        return numpy.asarray(image.convert("RGB")).astype(int)


def choose(page: EnginePage, entry: str) -> None:
    """Right click on the canvas, then click an entry of its menu."""
    raw = page.page.page
    raw.mouse.click(*raw.evaluate(FREE), button="right")
    raw.get_by_text(entry, exact=True).last.click()


@pytest.mark.parametrize("drawn", slow.cases({"plain": (PLAIN,), "SDXL with all": (LARGE,)}, ["SDXL with all"]))
def test_a_stock_workflow_runs_on_engines_after_four_clicks(page: EnginePage, drawn: Any) -> None:
    raw = page.page.page
    raw.evaluate(DRAW, drawn)
    page.page.fit(**MARGINS)
    before, native = raw.evaluate(WIRES), picture(page, page.comfy)
    choose(page, "Accelerate this workflow")
    raw.wait_for_function("() => app.graph.findNodesByType('TRTAccelerate').length === 1")
    page.page.fit(**MARGINS)
    page.shot("inserted")
    assert raw.evaluate(OVERLAPS) == []
    node = page.node("TRTAccelerate")
    names = raw.evaluate("id => app.graph.getNodeById(id).inputs.filter(i => i.link != null).map(i => i.name)", node)
    nets = ["control_net_1", "control_net_2"] if drawn is LARGE else []
    assert [name for name in names if name != "vae"] == ["model", *nets]
    raw.evaluate("""id => { for (const [name, value] of Object.entries({ min_size: 64, opt_size: 128, max_size: 512 }))
        app.graph.getNodeById(id).widgets.find(w => w.name === name).value = value; }""", node)
    raw.locator(".hybrid-trt-workflow button", has_text="Build").first.click()
    page.wait_for(node, "building", "queued", timeout=60)
    page.shot("building")
    page.wait_for(node, "ready", timeout=240)
    accelerated = picture(page, page.comfy)
    assert abs(accelerated - native).max() <= 1
    status = page.wait_until(node, lambda shown: "Last run" in shown["text"], "a last run")
    assert "normal speed" not in status["text"], "all steps of all networks were accelerated"
    page.shot("ran")
    choose(page, "Remove acceleration")
    raw.wait_for_function("() => app.graph.findNodesByType('TRTAccelerate').length === 0")
    assert raw.evaluate(WIRES) == before


#: The graph with both samplers in a subgraph, which is open and has a view of its own; a link of it has a reroute.
IN_SUBGRAPH = """() => { const graph = app.graph, lora = graph.findNodesByType('LoraLoaderModelOnly')[0];
    const link = graph.getLink(lora.outputs[0].links[0]); graph.createReroute([700, -200], link);
    app.canvas.selectItems([...graph.findNodesByType('KSampler'), ...graph.findNodesByType('VAEDecode')]);
    const { node } = graph.convertToSubgraph(app.canvas.selectedItems); app.canvas.setGraph(node.subgraph);
    app.canvas.ds.scale = 0.77; app.canvas.ds.offset[0] = 33;
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }"""
VIEW = "() => [app.canvas.graph.id, app.canvas.ds.scale, ...app.canvas.ds.offset]"
#: What undo has to give back: nodes with their places and values, links with their reroutes, of all graphs.
KEPT = """() => { const { nodes, links, definitions, extra } = JSON.parse(JSON.stringify(app.rootGraph.serialize()));
    const plain = nodes => nodes.map(n => [n.id, n.type, n.pos.map(Math.round), n.widgets_values]);
    return JSON.stringify([plain(nodes), links.sort(), extra.reroutes, extra.linkExtensions,
        definitions.subgraphs.map(({ nodes, links }) => [plain(nodes), links])]); }"""


def test_one_undo_takes_acceleration_out_again_in_an_open_subgraph_too(page: EnginePage) -> None:
    raw = page.page.page
    raw.evaluate(DRAW, LARGE)
    raw.evaluate(IN_SUBGRAPH)
    page.page.settle()
    drawn = raw.evaluate("() => JSON.parse(JSON.stringify(app.rootGraph.serialize()))")
    assert to_prompt(drawn, page.comfy.object_info()) == page.page.prompt()
    before, view, native = raw.evaluate(KEPT), raw.evaluate(VIEW), picture(page, page.comfy)
    choose(page, "Accelerate this workflow")
    raw.wait_for_function("() => app.rootGraph.findNodesByType('TRTAccelerate').length === 1")
    assert raw.evaluate(VIEW) == view
    assert raw.evaluate(KEPT) != before
    assert abs(picture(page, page.comfy) - native).max() <= 1
    raw.evaluate("() => app.extensionManager.workflow.activeWorkflow.changeTracker.undo()")
    raw.wait_for_function("() => app.rootGraph.findNodesByType('TRTAccelerate').length === 0")
    assert raw.evaluate(KEPT) == before
    assert raw.evaluate(VIEW) == view
    raw.evaluate("() => app.extensionManager.workflow.activeWorkflow.changeTracker.redo()")
    raw.wait_for_function("() => app.rootGraph.findNodesByType('TRTAccelerate').length === 1")
    choose(page, "Remove acceleration")
    raw.wait_for_function("() => app.rootGraph.findNodesByType('TRTAccelerate').length === 0")
    kept = [sorted(json.loads(text)[1]) for text in (raw.evaluate(KEPT), before)]
    assert kept[0] == kept[1]


#: The graph with its loader and its sampler in a subgraph, seen from outside.
LOADER_INSIDE = """() => { const graph = app.graph, of = type => graph.findNodesByType(type);
    app.canvas.selectItems([...of('CheckpointLoaderSimple'), ...of('CLIPTextEncode'), ...of('KSampler')]);
    graph.convertToSubgraph(app.canvas.selectedItems).node.title = 'Inner sampler';
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }"""
BADGES = """() => app.graph.nodes.find(n => n.isSubgraphNode?.()).badges
    .map(b => (b.text === undefined ? b() : b).text).filter(Boolean)"""
MARK = "⚡ TRT inside"


def test_a_subgraph_node_says_that_our_nodes_are_inside_until_they_are_taken_out(page: EnginePage) -> None:
    raw = page.page.page
    raw.evaluate(DRAW, PLAIN)
    raw.evaluate(LOADER_INSIDE)
    page.page.fit(**MARGINS)
    before = page.page.prompt()
    assert MARK not in raw.evaluate(BADGES)
    choose(page, "Accelerate this workflow")
    page.toast("in your workflow now, inside Inner sampler")
    assert raw.evaluate("() => app.graph.findNodesByType('TRTAccelerate').length") == 0
    assert raw.evaluate(BADGES) == [MARK]
    assert MARK not in json.dumps(page.page.workflow(), ensure_ascii=False), "no file has it"
    shown = raw.locator("[data-node-id]").get_by_text(MARK)
    if page.page.vue:
        shown.wait_for()
    page.shot("marked")
    choose(page, "Remove acceleration")
    raw.wait_for_function(f"mark => !({BADGES})().includes(mark)", arg=MARK)
    assert shown.count() == 0
    assert page.page.prompt() == before
