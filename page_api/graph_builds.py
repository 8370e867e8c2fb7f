"""Builds of all engines that a graph needs, in this process and without a page, as *Build all* does."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from execution import CacheType, PromptExecutor, validate_prompt
from server import PromptServer

from ..architectures.shapes import SIZE_NAMES
from ..comfy_model.comfyui_internals import Feature, switched_off
from ..engine_builder.jobs import Job
from ..node_names import BUILD_NOW, ENGINE_NODES, REPORT, USE_NATIVE, WHEN_MISSING
from .build_routes import states
from .builds import builds
from .prompt_errors import failure, refusal

_REPORT_ID = "hybrid_trt_build"


def build_graph(prompt: Mapping[str, Any], tell: Callable[[str, float], None]) -> dict[str, dict]:
    """Build the missing engines of a graph's nodes, and return the nodes' states by id.

    Nodes that leave their sizes to Auto get sizes from the graph's pictures, as in the page. These depend on the model,
    so all nodes run once before.

    Args:
        prompt: the whole graph as API prompt.
        tell: called with the phase and the fraction done of the current build.

    Raises:
        ValueError: the graph cannot run; the text says which node and why.
    """
    if why := switched_off([Feature.WHOLE_GRAPHS]):
        raise ValueError(why[0])
    engines = [node for node, entry in prompt.items() if entry["class_type"] in ENGINE_NODES]
    executor = PromptExecutor(PromptServer.instance, CacheType.CLASSIC, {"lru": 0, "ram": 0, "ram_inactive": 0})
    tell("loading the models", 0.0)
    _run(executor, _with(prompt, engines, {WHEN_MISSING: USE_NATIVE}))
    sized = dict(prompt)
    for node, state in states(prompt, [[node] for node in engines]).items():
        auto = state["sizes"]["auto"]
        if auto and not any(prompt[node]["inputs"].get(name) for name in SIZE_NAMES):
            sized |= _with(prompt, [node], auto)

    def changed(job: Job) -> None:
        tell(f"{job.label}: {job.phase}", job.fraction)

    builds.subscribe(changed)
    _run(executor, _with(sized, engines, {WHEN_MISSING: BUILD_NOW}))
    return states(sized, [[node] for node in engines])


def _with(prompt: Mapping[str, Any], nodes: list[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt in which some nodes have other inputs."""
    return {**prompt, **{node: {**prompt[node], "inputs": {**prompt[node]["inputs"], **inputs}} for node in nodes}}


def _run(executor: PromptExecutor, prompt: dict[str, Any]) -> None:
    """Run only the engine nodes of a prompt, and the nodes that they depend on."""
    engines = [node for node, entry in prompt.items() if entry["class_type"] in ENGINE_NODES]
    reports = {f"{_REPORT_ID}_{node}": {"class_type": REPORT, "inputs": {"after": [node, 0]}} for node in engines}
    prompt, prompt_id = {**prompt, **reports}, uuid.uuid4().hex
    valid, error, outputs, refused = asyncio.run(validate_prompt(prompt_id, prompt, list(reports)))
    if (why := refusal(None if valid else error, refused)) is not None:
        raise ValueError(why)
    executor.execute(prompt, prompt_id, {}, outputs)
    if (why := failure(executor.status_messages)) is not None:
        raise ValueError(why)
