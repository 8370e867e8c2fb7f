"""For tests of engine nodes in the page: the shipped workflow with a node for each engine, in both kinds of nodes."""

from __future__ import annotations

import shutil
from typing import Any

from comfy_process import ComfyProcess
from engine_page import EnginePage
from shipped_workflows import shipped
from workflow_recipes import with_tiny_models
from workflow_to_prompt import set_widget

NAME = "sd15_advanced"
TITLE = "SD 1.5 - advanced nodes"
MARGINS = {"left": 72, "top": 112, "right": 12, "bottom": 60}
NET_1, NET_2 = "TRT ControlNet Engine 1", "TRT ControlNet Engine 2"


def workflow(info: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The shipped workflow with the tiny models; nothing is built unless a button is pressed."""
    made = with_tiny_models(shipped(NAME), info)
    for engine in ("TRTUNetEngine", "TRTControlNetEngine"):
        for widget, value in {"when_missing": "use native", **changes}.items():
            set_widget(made, engine, widget, value, info)
    return made


def load(page: EnginePage, made: dict[str, Any]) -> None:
    page.page.load(made, NAME)
    page.page.fit(**MARGINS)


def no_engines(comfy: ComfyProcess) -> None:
    """An empty library, known to the page."""
    shutil.rmtree(comfy.base / "models" / "trt_engines", ignore_errors=True)


def opened_anew(page: EnginePage, made: dict[str, Any]) -> int:
    """Open a workflow with an empty library; return its first ControlNet's engine node once its state is known."""
    no_engines(page.comfy)
    load(page, made)
    page.wait_for(page.node(NET_1), "unknown", "none", timeout=60)
    return page.node(NET_1)
