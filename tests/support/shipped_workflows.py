"""The shipped workflows by name, and what a running ComfyUI says about their nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import slow
from workflow_recipes import RECIPES
from workflow_transformers import TRANSFORMERS as PICTURES
from workflow_videos import VIDEOS

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
NAMES = [recipe.name for recipe in RECIPES]
TITLES = {recipe.name: recipe.title for recipe in RECIPES}
TRANSFORMERS = [recipe.name for recipe in (*PICTURES, *VIDEOS)]
IN_PAGES = slow.cases({name: name for name in NAMES}, set(TRANSFORMERS) - {
    "flux1_controlnet", "qwen_edit", "ltx23_text_to_video"})  # fmt: skip
"""All names for tests in the page; of transformers' workflows, which are alike there, the quick tests open three."""

Workflow = dict[str, Any]


def shipped(name: str) -> Workflow:
    return json.loads((FOLDER / f"{TITLES[name]}.json").read_text(encoding="utf-8"))
