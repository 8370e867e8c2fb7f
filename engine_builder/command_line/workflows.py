"""The commands on workflow files, in UI format and in API format: accelerate a workflow, and build its engines."""

from __future__ import annotations

import errno
import importlib
import json
import logging
from argparse import Namespace
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from ...architectures.shapes import SIZE_NAMES
from ...backends import AUTO
from ...engine_library.safe_files import NOTES, read_bytes, write_file
from ...engine_library.schema import loads_whole
from ...node_names import ENGINE_NODES
from ...saved_workflows.accelerate import accelerate
from ...saved_workflows.graph import Workflow, WorkflowError, change
from ...saved_workflows.to_prompt import change_prompt, is_prompt, to_prompt
from . import comfyui

PICTURE = 1 << 28
"""Most bytes of a picture that holds a workflow."""


def accelerated(options: Namespace) -> tuple[dict[str, Any], str]:
    """Write an accelerated copy of a workflow; return the result as data and as text."""
    source: Path = options.workflow
    target: Path = options.out or source.with_name(f"{source.stem} (accelerated).json")
    if options.out is None and target.exists():
        raise comfyui.Unusable(f"{target} exists, so nothing was written; give --out with that name to write over it.")
    data = _read(source)
    if is_prompt(data):
        comfyui.start(options.comfyui, options.library, options.device)
    added = _accelerate(data, source)
    left = "" if is_prompt(data) else change(data, Workflow.left_alone)
    if not added:
        text = "Nothing to accelerate: each model that can be followed to a sampler has a node. Nothing was written."
        return {"added": [], "file": None, "left": left}, f"{text}\n{left}".strip()
    write_file(target, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    nodes = [{"id": node["id"], "type": node["type"]} for node in added]
    text = f"{target}\nadded: {', '.join(node['type'] for node in added)}\n{left}".strip()
    return {"added": nodes, "file": str(target), "left": left}, text


def built(options: Namespace, tell: Callable[[str, float], None]) -> tuple[dict[str, Any], str, bool]:
    """Build all engines that a workflow needs; return the result as data and text, and whether all are there."""
    if options.force:
        raise comfyui.Unusable("--force builds the engine of one model again; leave it away with --workflow.")
    source: Path = options.workflow
    data = _read(source)
    tell("loading ComfyUI's nodes", 0.0)
    logging.disable(logging.ERROR)  # ComfyUI logs over many lines; an error that matters here ends the command
    package = comfyui.start(options.comfyui, options.library, options.device)
    prompt = _prompt(data, source)
    if not any(entry["class_type"] in ENGINE_NODES for entry in prompt.values()):
        _accelerate(data, source)
        prompt = _prompt(data, source)
    engines = [node for node, entry in prompt.items() if entry["class_type"] in ENGINE_NODES]
    if not engines:
        raise WorkflowError(f"{source} needs no engine: no model in it leads to a sampler.")
    for node in engines:
        prompt[node]["inputs"].update(_settings(options))
    states = importlib.import_module(f"{package}.page_api.own_prompts").build_graph(prompt, tell)
    found = [{"node": node, **{name: one[name] for name in ("input", "label", "state", "text")},
              "engines": (one["engine"] or {}).get("names", [])}
             for node, state in states.items() for one in (state, *state.get("others", ()))]  # fmt: skip
    lines = [f"{one['state']:12} {one['label']}: {', '.join(one['engines']) or one['text']}" for one in found]
    return {"engines": found}, "\n".join(lines), all(one["state"] == "ready" for one in found)


def _settings(options: Namespace) -> dict[str, Any]:
    """Return the inputs that the command line sets on all engine nodes of the graph."""
    sizes = {name: value for name in SIZE_NAMES if (value := getattr(options, name))}
    chosen = {name: value for name in ("precision", "backend") if (value := getattr(options, name)) != AUTO}
    return sizes | chosen | ({"weights": "replaceable"} if options.replaceable else {})


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = read_bytes(path.resolve(), PICTURE)
        text = _taken_out(raw) if raw.startswith((b"\x89PNG", b"RIFF")) else raw
        if len(text) > NOTES:
            raise OSError(errno.EFBIG, "too large")
        data = loads_whole(text)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        text = f"{path} was left alone: its workflow has more than {NOTES >> 20} MB"
        raise WorkflowError(f"{text}; take the pictures out of its notes and nodes, and save it again.") from None
    except ValueError as error:
        raise WorkflowError(f"{path} was left alone: {error}; save the workflow in ComfyUI first.") from None
    if not is_prompt(data) and not (isinstance(data, dict) and isinstance(data.get("nodes"), list)):
        raise WorkflowError(f"{path} is no workflow of ComfyUI, in neither of its formats, so nothing was done.")
    return data


def _taken_out(picture: bytes) -> str:
    """Return the workflow, or else the prompt, that ComfyUI wrote into a PNG or a WebP."""
    try:
        with importlib.import_module("PIL.Image").open(BytesIO(picture), formats=("PNG", "WEBP")) as image:
            texts = [*(f"{name}:{text}" for name, text in image.info.items()), *image.getexif().values()]
    except Exception as error:  # damaged files make PIL raise errors of many kinds
        raise ValueError(f"it is a picture that cannot be read ({type(error).__name__})") from error
    for name in ("workflow:", "prompt:"):
        for text in texts:
            if isinstance(text, str) and text.startswith(name):
                return text.removeprefix(name)
    raise ValueError("it is a picture without a workflow")


def _accelerate(data: dict[str, Any], source: Path) -> list[dict[str, Any]]:
    try:
        return change_prompt(data, comfyui.node_infos(), accelerate) if is_prompt(data) else change(data, accelerate)
    except WorkflowError as error:
        raise WorkflowError(f"{source} was left as it is: {error}.") from error


def _prompt(data: dict[str, Any], source: Path) -> dict[str, Any]:
    try:
        return data if is_prompt(data) else to_prompt(data, comfyui.node_infos())
    except WorkflowError as error:
        raise WorkflowError(f"{source} cannot be built: {error}.") from error
