#!/usr/bin/env python3
"""Builds the shipped workflows and blueprints in ComfyUI's own page, so that they are exactly what a user would have
saved; and draws the workflows' thumbnails.

    python tools/make_workflows.py --comfyui PATH --base DIR [--check] [names]

The base directory is a ComfyUI base directory with this pack in its custom_nodes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from browser import ComfyPage, chromium, comfy_page
from comfy_process import ComfyProcess
from workflow_blueprints import BLUEPRINTS, INTO_ONE, Blueprint
from workflow_parts import Recipe, app_mode
from workflow_recipes import RECIPES
from workflow_thumbnails import write
from workflow_to_prompt import VIRTUAL

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS, SUBGRAPHS = ROOT / "workflows", ROOT / "subgraphs"
PACK = "hybrid-trt"
#: Lets the page open a template so large that it can be read; see js/lib/template_view.mjs.
MARK = "hybrid_trt_template"
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: The page builds a recipe: nodes, widgets, links, then columns of nodes by their real sizes, with groups around them.
BUILD = """async (recipe) => {
    app.graph.clear();
    const GAP = 24, BELOW = 50, TITLE = LiteGraph.NODE_TITLE_HEIGHT, GROUP_TITLE = 50, made = {};
    const fail = text => { throw new Error(`${recipe.name}: ${text}`); };
    for (const [key, spec] of Object.entries(recipe.nodes)) {
        const node = LiteGraph.createNode(spec.type) ?? fail(`no node ${spec.type}`);
        app.graph.add(node);
        if (spec.title) node.title = spec.title;
        for (const [name, value] of Object.entries(spec.widgets))
            (node.widgets?.find(w => w.name === name) ?? fail(`no widget ${name} on ${key}`)).value = value;
        made[key] = node;
    }
    for (const [key, spec] of Object.entries(recipe.nodes))
        for (const [name, source] of Object.entries(spec.inputs)) {
            const [from, output] = source.split("."), origin = made[from];
            const slot = origin.outputs.findIndex(o => [o.name, o.label, o.localized_name].includes(output));
            const input = made[key].inputs.findIndex(i => i.name === name);
            if (slot < 0 || input < 0 || !origin.connect(slot, made[key], input))
                fail(`no link ${source} -> ${key}.${name}`);
        }
    await new Promise(done => setTimeout(done, 500));
    let x = 0;
    for (const group of recipe.groups) {
        const left = x;
        let bottom = 0;
        x += GAP / 2;
        for (const column of group.columns) {
            let y = GROUP_TITLE, width = 0;
            for (const key of column) {
                const node = made[key], [w, h] = recipe.nodes[key].size, least = node.computeSize();
                node.setSize([Math.max(w, least[0]), Math.max(h, least[1])]);
                node.pos = [x, y + TITLE];
                y += node.size[1] + TITLE + BELOW;  // Vue nodes are taller
                width = Math.max(width, node.size[0]);
            }
            bottom = Math.max(bottom, y);
            x += width + GAP;
        }
        const box = new LiteGraph.LGraphGroup(group.title);
        box.color = group.color;
        box.pos = [left, 0];
        box.size = [x - GAP / 2 - left, bottom];
        app.graph.add(box);
        x += GAP / 2;
    }
    app.graph.setDirtyCanvas(true, true);
    await new Promise(done => setTimeout(done, 300));
    return JSON.parse(JSON.stringify((await app.graphToPrompt()).workflow));
}"""


def build(page: ComfyPage, recipe: Recipe, versions: dict[str, str]) -> dict[str, Any]:
    """Build one workflow in the page; the same recipe always gives the same file."""
    workflow = _draw(page, recipe)
    workflow["id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{PACK}/workflows/{recipe.name}"))
    extra = workflow.setdefault("extra", {})
    extra.pop("ds", None)  # without a saved view the page fits the workflow into its window
    extra[MARK] = True
    extra |= {"linearMode": False, "linearData": app_mode(recipe.nodes)}
    _name_packs(workflow, recipe, versions)
    return _whole_numbers(workflow)


def build_blueprint(page: ComfyPage, blueprint: Blueprint, versions: dict[str, str]) -> dict[str, Any]:
    """Build one blueprint in the page; the page's random ids become the same ones each time."""
    _draw(page, blueprint.recipe)
    workflow = page.page.evaluate(INTO_ONE, blueprint.for_page())
    workflow["definitions"]["subgraphs"][0]["category"] = "Hybrid TRT"
    workflow["extra"] = {"BlueprintDescription": blueprint.words, "BlueprintSearchAliases": ["TRT", "faster"]}
    _name_packs(workflow["definitions"]["subgraphs"][0], blueprint.recipe, versions)
    text = json.dumps(_whole_numbers(workflow))
    for number, found in enumerate(dict.fromkeys(UUID.findall(text))):
        text = text.replace(found, str(uuid.uuid5(uuid.NAMESPACE_URL, f"{PACK}/{blueprint.recipe.name}/{number}")))
    return json.loads(text)


def _draw(page: ComfyPage, recipe: Recipe) -> dict[str, Any]:
    """Draw a recipe in a graph of its own: in one graph the page gives new nodes the sizes of earlier ones."""
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    return page.page.evaluate(BUILD, {"name": recipe.name, "nodes": recipe.nodes, "groups": recipe.groups})


def _name_packs(graph: dict[str, Any], recipe: Recipe, versions: dict[str, str]) -> None:
    """Write on each node where it comes from, and which models it names."""
    graph["nodes"].sort(key=lambda node: node["id"])
    for node, spec in zip(graph["nodes"], recipe.nodes.values(), strict=True):
        if node["type"] in VIRTUAL:
            continue
        pack = PACK if node["type"].startswith("TRT") else "comfy-core"
        node["properties"] = {"Node name for S&R": node["type"], "cnr_id": pack, "ver": versions[pack]}
        if "models" in spec:
            node["properties"]["models"] = spec["models"]


def pack_version() -> str:
    """The version in pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version\s*=\s*"([^"]+)"', project, re.M)  # tomllib is not in Python 3.10
    if found is None:
        raise ValueError("pyproject.toml has no version")
    return found[1]


def text_of(workflow: dict[str, Any]) -> str:
    """The workflow as the file holds it."""
    return json.dumps(workflow, indent=2, ensure_ascii=False) + "\n"


def make(process: ComfyProcess, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Build the named workflows (without names: all of them) on a running server."""
    versions = {PACK: pack_version(), "comfy-core": process.get("/system_stats")["system"]["comfyui_version"]}
    with chromium() as browser, comfy_page(browser, process.url) as page:
        made = {recipe.name: build(page, recipe, versions) for recipe in RECIPES if not names or recipe.name in names}
        made |= {one.recipe.name: build_blueprint(page, one, versions) for one in BLUEPRINTS
                 if not names or one.recipe.name in names}
        if page.errors:
            raise RuntimeError(f"the page had JavaScript errors: {page.errors}")
    return made


def _whole_numbers(value: Any) -> Any:
    """Positions and sizes without fractions of pixels: fonts differ between machines."""
    if isinstance(value, dict):
        return {key: [round(n) for n in item] if key in ("pos", "size", "bounding") else _whole_numbers(item)
                for key, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


def main(arguments: list[str] | None = None) -> int:
    """Command line: write the workflows, or with --check only say which ones would change."""
    parser = argparse.ArgumentParser(description="Build the shipped workflows and blueprints in ComfyUI's page.")
    parser.add_argument("--comfyui", type=Path, required=True, help="where ComfyUI's source lies")
    parser.add_argument("--base", type=Path, required=True, help="a ComfyUI base directory with this pack in it")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs ComfyUI")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is out of date")
    files = {recipe.name: (recipe, WORKFLOWS) for recipe in RECIPES}
    files |= {one.recipe.name: (one.recipe, SUBGRAPHS) for one in BLUEPRINTS}
    parser.add_argument("names", nargs="*", help=f"which ones (default: all): {', '.join(files)}")
    options = parser.parse_args(arguments)
    stale = 0
    with ComfyProcess(options.comfyui, options.base, options.python) as process:
        made = make(process, options.names)
    for name, workflow in made.items():
        recipe, folder = files[name]
        path, text = folder / f"{recipe.title}.json", text_of(workflow)
        if not options.check and folder == WORKFLOWS:
            write(recipe, WORKFLOWS)
        same = path.exists() and path.read_text(encoding="utf-8") == text
        stale += not same
        if not same and not options.check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'unchanged' if same else 'out of date' if options.check else 'written'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
