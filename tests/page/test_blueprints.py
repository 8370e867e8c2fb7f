"""The shipped blueprints: ComfyUI lists them, and one that is put into the page runs on engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import ComfyPage
from comfy_process import ComfyProcess
from engine_page import EnginePage
from make_workflows import build_blueprint
from workflow_blueprints import BLUEPRINTS

FOLDER = Path(__file__).resolve().parents[2] / "subgraphs"
TITLE = "Two ControlNets, accelerated"
#: Puts the tiny models and sizes in, two pictures before the node, a report and a saved picture behind it.
WIRE = """() => { const node = app.graph.nodes.find(n => n.isSubgraphNode?.());
    const set = (on, values) => Object.entries(values).forEach(([name, value]) => {
        on.widgets.find(w => w.name === name).value = value; });
    set(node, { checkpoint: 'tiny_sd15.safetensors', 'ControlNet 1': 'tiny_sd15_a.safetensors',
        'ControlNet 2': 'tiny_sd15_b.safetensors', width: 128, height: 128, steps: 4, seed: 77 });
    set(node.subgraph.nodes.find(n => n.type === 'TRTAccelerate'),
        { min_size: 64, opt_size: 128, max_size: 512, max_images: 4, max_tokens: 616 });
    const make = (type, y) => { const made = LiteGraph.createNode(type); made.pos = [2000, y]; app.graph.add(made);
        return made; };
    ['control_a.png', 'control_b.png'].forEach((image, i) => { const load = make('LoadImage', 500 * i);
        set(load, { image }); load.connect(0, node, node.findInputSlot(`image ${i + 1}`)); });
    const report = make('TRTReport', 1000);
    node.connect(0, report, 0);
    report.connect(0, make('SaveImage', 1500), 0); }"""


def in_short(blueprint: dict[str, Any]) -> Any:
    """A blueprint without where things stand and which versions made it."""
    (inside,) = blueprint["definitions"]["subgraphs"]
    return [blueprint["extra"], [node["widgets_values"] for node in blueprint["nodes"]], inside["links"],
            [(node["id"], node["type"], node.get("widgets_values") or []) for node in inside["nodes"]],
            [(one["name"], one["type"], one["linkIds"]) for one in inside["inputs"] + inside["outputs"]]]


def test_comfyui_lists_the_blueprints_of_this_pack(comfy: ComfyProcess) -> None:
    listed = {key: entry for key, entry in comfy.get("/global_subgraphs").items()
              if entry["info"]["node_pack"] == "custom_nodes.hybrid-trt"}
    titles = {blueprint.recipe.title for blueprint in BLUEPRINTS}
    assert {entry["name"] for entry in listed.values()} == titles == {path.stem for path in FOLDER.iterdir()}
    for key in listed:
        data = json.loads(comfy.get(f"/global_subgraphs/{key}")["data"])
        assert len(data["nodes"]) == len(data["definitions"]["subgraphs"]) == 1
        assert data["nodes"][0]["type"] == data["definitions"]["subgraphs"][0]["id"]
        assert "TRTAccelerate" in {node["type"] for node in data["definitions"]["subgraphs"][0]["nodes"]}


@pytest.mark.browser
@pytest.mark.parametrize("blueprint", BLUEPRINTS, ids=lambda one: one.recipe.name)
def test_files_are_what_the_recipes_make(one_page: ComfyPage, blueprint: Any) -> None:
    made = build_blueprint(one_page, blueprint, {"hybrid-trt": "0.0.0", "comfy-core": "0.0.0"})
    shipped = json.loads((FOLDER / f"{blueprint.recipe.title}.json").read_text(encoding="utf-8"))
    assert in_short(made) == in_short(shipped), "run tools/make_workflows.py"


@pytest.mark.browser
@pytest.mark.slow
def test_a_blueprint_found_by_search_runs_on_engines(one_page: ComfyPage, sd15: ComfyProcess) -> None:
    raw, page = one_page.page, EnginePage(one_page, "blueprint")
    raw.evaluate("() => { app.extensionManager.command.execute('Comfy.NewBlankWorkflow') }")
    raw.evaluate("() => { app.extensionManager.command.execute('Workspace.SearchBox.Toggle') }")
    field = raw.get_by_role("dialog").last.locator("input").first
    field.fill(TITLE)
    raw.get_by_role("dialog").last.get_by_text("Makes a picture from a prompt and two").first.wait_for()
    page.shot("found")
    field.press("Enter")
    raw.mouse.move(600, 300)
    one_page.settle()
    raw.mouse.click(600, 300)
    raw.wait_for_function("title => app.graph.nodes.some(n => n.title === title)", arg=TITLE)
    one_page.settle()
    raw.evaluate(WIRE)
    outputs = one_page.queue()
    one_page.fit()
    page.shot("ran")
    (report,) = (output["report"][0] for output in outputs.values() if "report" in output)
    assert [(row["engine"], row["native"]) for row in report["rows"]] == [(4, 0)] * 3 + [(1, 0)], "the VAE decodes once"
    assert not one_page.errors
