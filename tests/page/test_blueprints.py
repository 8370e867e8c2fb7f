"""The shipped blueprints: ComfyUI lists them, and one that is put into the page runs on engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import ComfyPage
from comfy_process import ComfyProcess
from make_workflows import build_blueprint
from workflow_blueprints import BLUEPRINTS

FOLDER = Path(__file__).resolve().parents[2] / "subgraphs"


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
