"""The shipped workflows by name, and what a running ComfyUI says about their nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comfy_process import ComfyProcess
from workflow_recipes import RECIPES

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
NAMES = [recipe.name for recipe in RECIPES]
TITLES = {recipe.name: recipe.title for recipe in RECIPES}

Workflow = dict[str, Any]


def shipped(name: str) -> Workflow:
    return json.loads((FOLDER / f"{TITLES[name]}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def object_info(comfy: ComfyProcess) -> dict[str, Any]:
    return comfy.object_info()
