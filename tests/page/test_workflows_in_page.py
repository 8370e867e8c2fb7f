"""The shipped workflows in ComfyUI's page: they open, convert as the page does, and run there, built by clicks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import slow
from browser import ComfyPage
from comfy_process import ComfyProcess
from engine_page import STACK_MEASURED, EnginePage
from make_workflows import build
from node_boxes import overlaps
from playwright.sync_api import expect
from shipped_workflows import IN_PAGES, NAMES, Workflow, shipped
from workflow_recipes import RECIPES, with_tiny_models
from workflow_to_prompt import bypass, set_widget, to_prompt

pytestmark = pytest.mark.browser
BOTH_KINDS_OF_NODES = True
SD15_NETS, SDXL_NETS = ("tiny_sd15_a", "tiny_sd15_b"), ("tiny_sdxl_a", "tiny_sdxl_b")
NETS = {name: SDXL_NETS if name.startswith("sdxl") else SD15_NETS for name in NAMES}
ROWS = """() => { const node = app.graph.nodes.find(n => n.type === 'TRTApplyControlNet');
    return { sockets: node.inputs.filter(i => !i.widget).map(i => i.label ?? i.name),
             linked: node.inputs.filter(i => i.link != null).map(i => i.name),
             widgets: node.widgets.map(w => w.label ?? w.name) }; }"""
SET_ROWS = """count => { app.graph.nodes.find(n => n.type === 'TRTApplyControlNet')
    .widgets.find(w => w.name === 'rows').value = count; }"""
#: A value of the stack's, and how many edits of the workflow can be undone.
SET_VALUE = """([name, value]) => { app.graph.nodes.find(n => n.type === 'TRTApplyControlNet')
    .widgets.find(w => w.name === name).value = value; }"""
#: Has a report say as much as one of a slow first run with many models does.
LONG_REPORT = """id => app.graph.getNodeById(id).onExecuted({ native: [false], report: [{}],
    text: ["Accelerated: 9 of 9 models" + "\\nlong_name: 20 on torch, 12 ms each, first 12.3 s".repeat(9)] })"""
EDITS = "() => app.extensionManager.workflow.activeWorkflow.changeTracker.undoQueue.length"
#: A Reroute into the decoder and a PrimitiveNode on the seed: nodes that only the page knows.
PAGE_NODES = """() => {
    const make = (type, x) => { const n = LiteGraph.createNode(type); n.pos = [x, 1300]; app.graph.add(n); return n; };
    const find = type => app.graph.nodes.find(n => n.type === type);
    const link = (from, to, name) => from.connect(0, to, to.inputs.findIndex(i => i.name === name));
    const reroute = make('Reroute', 0), primitive = make('PrimitiveNode', 300);
    find('TRTReport').connect(0, reroute, 0);
    link(reroute, find('VAEDecode'), 'samples');
    link(primitive, find('KSampler'), 'seed');
    primitive.widgets[0].value = 4711; }"""

#: What the pack's look at the open graph finds above its engine nodes, and what ComfyUI's own serialisation has there.
LOOK = """async () => {
    const { Look } = await import('/extensions/hybrid-trt/lib/look.mjs');
    const { ancestors, engineNodes } = await import('/extensions/hybrid-trt/lib/graph.mjs');
    const ids = engineNodes(app.rootGraph).flatMap(found => found.ids);
    const looked = new Look(app.rootGraph).prompt(ids), { output } = await app.graphToPrompt();
    const latent = prompt => Object.values(prompt).map(n => [n.class_type, n.inputs])
        .filter(([kind]) => /Empty.*Latent(?!Audio)/.test(kind));
    return [looked, output].map(prompt => JSON.parse(JSON.stringify([ancestors(prompt, ids), latent(prompt)]))); }"""
#: Above the UNet's engine node: a LoRA behind a reroute with a primitive on its strength, a bypassed one, both kinds
#: with the engine node in a subgraph that shows the second strength outside, and a muted ControlNet loader.
TANGLE = """() => {
    const make = (type, x) => { const n = LiteGraph.createNode(type); n.pos = [x, 1500]; app.graph.add(n); return n; };
    const find = type => app.graph.nodes.find(n => n.type === type), loader = find('CheckpointLoaderSimple');
    const link = (from, to, name) => from.connect(0, to, to.inputs.findIndex(i => i.name === name));
    const reroute = make('Reroute', 0), primitive = make('PrimitiveNode', 200), engine = find('TRTUNetEngine');
    const [first, second, third] = [400, 800, 1200].map(x => make('LoraLoaderModelOnly', x));
    loader.connect(0, reroute, 0);
    reroute.connect(0, first, 0); first.connect(0, second, 0); second.connect(0, third, 0); third.connect(0, engine, 0);
    link(primitive, first, 'strength_model');
    primitive.widgets[0].value = 0.25;
    second.mode = 4;
    third.widgets.find(w => w.name === 'strength_model').value = 0.625;
    app.graph.nodes.filter(n => n.type === 'ControlNetLoader')[1].mode = 2;
    app.graph.convertToSubgraph(new Set([third, engine]));
    const outer = app.graph.nodes.find(n => n.isSubgraphNode?.()), inner = outer.subgraph;
    const lora = inner.nodes.find(n => n.type === 'LoraLoaderModelOnly');
    inner.inputNode.connectByType(-1, lora, 'FLOAT');
    const slot = lora.inputs.findIndex(i => i.name === 'strength_model');
    if (lora.inputs[slot].link == null) {
        const input = inner.addInput('strength_model', 'FLOAT');
        input.connect(lora.inputs[slot], lora);
    }
    const shown = outer.widgets.find(w => w.name.includes('strength'));
    if (shown) shown.value = 0.125;
    return { shown: shown?.value, inner: lora.widgets.find(w => w.name === 'strength_model').value }; }"""

#: The UNet's engine node in a subgraph whose node shows the largest size outside; what both say of the sizes.
PROMOTE = """() => {
    const engine = app.graph.nodes.find(n => n.type === 'TRTUNetEngine');
    app.graph.convertToSubgraph(new Set([engine]));
    const outer = app.graph.nodes.find(n => n.isSubgraphNode?.()), inner = outer.subgraph;
    const node = inner.nodes.find(n => n.type === 'TRTUNetEngine');
    inner.addInput('max_size', 'INT').connect(node.inputs.find(i => i.name === 'max_size'), node); }"""
SET_OUTSIDE = """value => { const outer = app.graph.nodes.find(n => n.isSubgraphNode?.());
    outer.widgets.find(w => w.name === 'max_size').value = value;
    app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState(); }"""
SIZES_INSIDE = """() => app.graph.nodes.find(n => n.isSubgraphNode?.()).subgraph.nodes
    .find(n => n.type === 'TRTUNetEngine').widgets.find(w => w.name === 'size_preset').value"""


#: Keeps the id of the next run that ends.
RUN_ENDS = """() => ['success', 'error'].forEach(end =>
    app.api.addEventListener(`execution_${end}`, e => { window.__ended = e.detail.prompt_id; }, { once: true }))"""


@pytest.fixture
def page(page: EnginePage) -> ComfyPage:
    return page.page


@slow.when("vue")
@pytest.mark.parametrize("name", IN_PAGES)
def test_opens_without_problems_and_converts_as_the_page_does(
    page: ComfyPage, object_info: dict[str, Any], name: str
) -> None:
    """With models that exist here: without them ComfyUI marks the loaders, as it should."""
    workflow = with_tiny_models(shipped(name), object_info, NETS[name])
    page.load(workflow)
    loaded = time.monotonic()
    prompt = page.prompt()
    assert prompt == to_prompt(workflow, object_info)
    assert prompt == to_prompt(page.workflow(), object_info)  # a saved file lists widgets as sockets too
    looked, serialised = page.page.evaluate(LOOK)
    assert looked == serialised
    page.page.wait_for_timeout(max(0, 600 - 1000 * (time.monotonic() - loaded)))  # the error panel takes its time
    assert page.problems() == []


@slow.when("vue")
@pytest.mark.parametrize("name", IN_PAGES)
def test_files_are_what_the_recipes_make(page: ComfyPage, object_info: dict[str, Any], name: str) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    versions = {"hybrid-trt": "0.0.0", "comfy-core": "0.0.0"}
    made = build(page, recipe, versions)
    assert to_prompt(made, object_info) == to_prompt(shipped(name), object_info), "run tools/make_workflows.py"


def _engines_bypassed(workflow: Workflow, info: dict[str, Any]) -> None:
    bypass(workflow, ["TRTSamplerPatch", "TRTControlNetEngine"])


def _apply_bypassed(workflow: Workflow, info: dict[str, Any]) -> None:
    bypass(workflow, ["TRTApplyControlNet", "TRTReport"])


def _accelerate_bypassed(workflow: Workflow, info: dict[str, Any]) -> None:
    """Each output gives out the input of its own name, as without the node."""
    net_2 = next(node for node in workflow["nodes"] if node.get("title", "").startswith("Load ControlNet 2"))
    bypass(workflow, ["TRTAccelerate"])
    (stack,) = (entry for entry in to_prompt(workflow, info).values() if entry["class_type"] == "TRTApplyControlNet")
    assert stack["inputs"]["rows.control_net_2"] == [str(net_2["id"]), 0]


def _net_muted(workflow: Workflow, info: dict[str, Any]) -> None:
    next(node for node in workflow["nodes"] if node["type"] == "TRTControlNetEngine")["mode"] = 2


def _third_row(workflow: Workflow, info: dict[str, Any]) -> None:
    set_widget(workflow, "TRTApplyControlNet", "rows", "3", info)
    set_widget(workflow, "TRTApplyControlNet", "rows.strength_3", 0.25, info)


def _random_seed(workflow: Workflow, info: dict[str, Any]) -> None:
    set_widget(workflow, "KSampler", "seed", 99, info)
    set_widget(workflow, "KSampler", "control_after_generate", "randomize", info)
    set_widget(workflow, "KSampler", "denoise", 0.5, info)


@slow.when("vue")
@pytest.mark.parametrize("change", [_engines_bypassed, _accelerate_bypassed, _apply_bypassed, _net_muted, _third_row,
                                    _random_seed])
def test_changes_convert_as_the_page_does(
    page: ComfyPage, object_info: dict[str, Any], change: Callable[[Workflow, dict[str, Any]], None]
) -> None:
    workflow = shipped("sd15_two_controlnets" if change is _accelerate_bypassed else "sd15_advanced")
    before = to_prompt(workflow, object_info)
    change(workflow, object_info)
    page.load(workflow)
    assert page.prompt() == to_prompt(workflow, object_info) != before


@slow.when("vue")
def test_nodes_of_the_page_alone_convert(page: ComfyPage, object_info: dict[str, Any]) -> None:
    page.load(shipped("sd15_advanced"))
    page.page.evaluate(PAGE_NODES)
    prompt = page.prompt()
    assert prompt == to_prompt(page.workflow(), object_info)
    assert next(entry for entry in prompt.values() if entry["class_type"] == "KSampler")["inputs"]["seed"] == 4711


@slow.when("vue")
def test_a_look_at_the_graph_finds_what_serialising_it_gives(page: ComfyPage, object_info: dict[str, Any]) -> None:
    """Through subgraphs, widgets that they show, reroutes, primitives, bypassed and muted nodes."""
    page.load(with_tiny_models(shipped("sd15_advanced"), object_info))
    values = page.page.evaluate(TANGLE)
    page.settle()
    looked, serialised = page.page.evaluate(LOOK)
    assert looked == serialised
    strengths = {n["inputs"]["strength_model"] for n in looked[0].values() if n["class_type"] == "LoraLoaderModelOnly"}
    assert strengths == {0.25, 0.125}, values
    engines = [node["inputs"] for node in looked[0].values() if node["class_type"].startswith("TRT")]
    assert sum("control_net" in inputs for inputs in engines) == 1, "one loader is muted"


def test_sizes_that_a_subgraph_shows_outside_are_those_that_are_sent(
    page: ComfyPage, object_info: dict[str, Any]
) -> None:
    """The page does not call the engine node's widget when the number outside changes."""
    page.load(with_tiny_models(shipped("sd15_advanced"), object_info))
    page.page.evaluate(PROMOTE)
    for size in (704, 1088):
        page.page.evaluate(SET_OUTSIDE, size)
        page.page.wait_for_function(f"size => ({SIZES_INSIDE})().includes(size)", arg=f"{size}")
        assert page.page.evaluate(SIZES_INSIDE).startswith("Custom")
        sent = [node["inputs"] for node in page.prompt().values() if node["class_type"] == "TRTUNetEngine"]
        assert [inputs["max_size"] for inputs in sent] == [size]
        looked, serialised = page.page.evaluate(LOOK)
        assert looked == serialised


def test_rows_of_the_stack_come_and_go(page: ComfyPage, object_info: dict[str, Any]) -> None:
    """Each row has its sockets and widgets, under names without the prefix; links and values of the others stay."""
    page.load(shipped("sd15_advanced"))
    strengths = {"rows.strength_1": 0.7, "rows.strength_2": 0.4}
    assert page.widgets("TRTApplyControlNet").items() >= strengths.items()
    linked = page.page.evaluate(ROWS)["linked"]
    assert [name for name in linked if name.startswith("rows.")] == [
        "rows.control_net_1", "rows.image_1", "rows.control_net_2", "rows.image_2"]
    page.page.evaluate(SET_ROWS, "3")
    page.settle()
    rows = page.page.evaluate(ROWS)
    assert rows["sockets"][-2:] == ["control_net_3", "image_3"]
    assert rows["widgets"][-3:] == ["strength_3", "start_3", "end_3"]
    assert rows["linked"] == linked
    assert page.widgets("TRTApplyControlNet").items() >= (strengths | {"rows.strength_3": 1.0}).items()
    assert page.prompt() == to_prompt(page.workflow(), object_info)
    page.page.evaluate(SET_ROWS, "1")
    page.settle()
    rows = page.page.evaluate(ROWS)
    assert rows["linked"] == linked[:-2]
    assert rows["widgets"] == ["rows", "strength_1", "start_1", "end_1"]
    page.page.evaluate(SET_ROWS, "2")
    page.settle()
    assert page.widgets("TRTApplyControlNet").items() >= strengths.items()


@slow.when("litegraph")
def test_undo_and_redo_go_through_every_edit_of_the_stack(page: ComfyPage) -> None:
    raw = page.page

    def seen() -> tuple[Any, ...]:
        raw.mouse.click(800, 850)  # the page takes the button's release for the end of an edit
        page.settle()
        raw.wait_for_function(STACK_MEASURED)
        return page.widgets("TRTApplyControlNet"), raw.evaluate(ROWS), raw.evaluate(EDITS)

    page.load(shipped("sd15_advanced"))
    states = [seen()]
    for edit in (["rows", "3"], ["rows", "1"]):
        raw.evaluate(SET_VALUE, edit)
        states.append(seen())
    assert [edits - states[0][2] for *_, edits in states] == [0, 1, 2]
    for command, course in (("Undo", states[-2::-1]), ("Redo", states[1:])):
        for state in course:
            raw.evaluate("name => { app.extensionManager.command.execute(`Comfy.${name}`) }", command)
            assert seen() == state, command


@slow.when("vue")  # App mode has no nodes
def test_app_mode_shows_the_widgets_that_matter_and_runs(
    page: ComfyPage, sd15: ComfyProcess, object_info: dict[str, Any]
) -> None:
    workflow, raw = with_tiny_models(shipped("sd15_two_controlnets"), object_info), page.page
    set_widget(workflow, "TRTAccelerate", "when_missing", "use native", object_info)  # the VAE has no engine here
    page.load(workflow)
    raw.evaluate("() => app.extensionManager.command.execute('Comfy.ToggleLinear')")
    tour = raw.get_by_role("button", name="Skip")  # may come at any time
    raw.add_locator_handler(tour, lambda button: button.click())
    said = raw.get_by_test_id("linear-widgets")
    for words in ("Prompt", "Negative prompt", "Control image 1 (edges)", "strength_1", "ckpt_name", "seed"):
        expect(said).to_contain_text(words)
    expect(raw.get_by_test_id("app-mode-widget-item")).to_have_count(len(workflow["extra"]["linearData"]["inputs"]))
    sd15.free()
    raw.evaluate(RUN_ENDS)
    raw.get_by_role("button", name="Run", exact=True).last.click()
    raw.wait_for_function("() => window.__ended", timeout=120_000)
    ran = raw.evaluate("() => window.__ended")
    report = str(next(node["id"] for node in workflow["nodes"] if node["type"] == "TRTReport"))
    assert sd15.get("/history")[ran]["outputs"][report]["text"][0].startswith("Accelerated: 3 of 4 models")
    raw.remove_locator_handler(tour)
    raw.evaluate("() => app.extensionManager.command.execute('Comfy.ToggleLinear')")


@slow.when("litegraph")  # App mode runs there
def test_runs_in_the_page(page: ComfyPage, sd15: ComfyProcess, object_info: dict[str, Any]) -> None:
    """All engines serve, and the status texts that the nodes then show make no node grow over another."""
    workflow = with_tiny_models(shipped("sd15_advanced"), object_info)
    page.load(workflow)
    sd15.free()  # cached nodes are not run again and would show no status
    outputs = page.queue()
    page.settle()
    node = next(node["id"] for node in workflow["nodes"] if node["type"] == "TRTReport")
    report = outputs[str(node)]["report"][0]
    assert all(row["engine"] == 4 and row["native"] == 0 for row in report["rows"])
    assert len(report["rows"]) == 3
    assert page.problems() == []
    assert overlaps(page.boxes()) == []
    page.page.evaluate(LONG_REPORT, node)
    page.until_still()
    assert overlaps(page.boxes()) == [], "a report of many lines is folded"
