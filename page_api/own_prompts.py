"""Prompts that the pack runs by itself: builds of all engines of a graph, and warming before real work."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfy_execution.graph_utils import is_link
from execution import CacheType, PromptExecutor, validate_prompt
from server import PromptServer

import nodes

from ..architectures.shapes import SIZE_NAMES
from ..comfy_model.comfyui_internals import Feature, switched_off
from ..engine_builder.jobs import Job
from ..node_names import BUILD_NOW, ENGINE_NODES, REPORT, USE_NATIVE, WHEN_MISSING
from ..sampling.call_stats import prompt_stats
from ..saved_workflows.to_prompt import is_prompt
from .build_orders import WARM, queued
from .build_routes import states
from .builds import builds

log = logging.getLogger(__name__)

WAITING, WARMING, WARM_NOW, FAILED = "waiting", "warming", "warm", "failed"
POLL_SECONDS = 0.1
_REPORT_ID = "hybrid_trt_build"


class NotRun(ValueError):
    """A prompt that cannot run, or failed; the text says why, in ComfyUI's words."""


def build_graph(prompt: Mapping[str, Any], tell: Callable[[str, float], None]) -> dict[str, dict]:
    """Build the missing engines of a graph's nodes, and return the nodes' states by id. Needs no page.

    Nodes that leave their sizes to Auto get sizes from the graph's pictures, as in the page. These depend on the model,
    so all nodes run once before.

    Args:
        prompt: the whole graph as API prompt.
        tell: called with the phase and the fraction done of the current build.

    Raises:
        NotRun: the graph cannot run; the text says which node and why.
    """
    if why := switched_off([Feature.WHOLE_GRAPHS]):
        raise NotRun(why[0])
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


def _with(prompt: Mapping[str, Any], ids: list[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt in which some nodes have other inputs."""
    return {**prompt, **{node: {**prompt[node], "inputs": {**prompt[node]["inputs"], **inputs}} for node in ids}}


def _run(executor: PromptExecutor, prompt: dict[str, Any]) -> None:
    """Run only the engine nodes of a prompt, and the nodes that they depend on."""
    engines = [node for node, entry in prompt.items() if entry["class_type"] in ENGINE_NODES]
    reports = {f"{_REPORT_ID}_{node}": {"class_type": REPORT, "inputs": {"after": [node, 0]}} for node in engines}
    prompt, prompt_id = {**prompt, **reports}, uuid.uuid4().hex
    outputs = asyncio.run(_outputs(prompt_id, prompt, list(reports)))
    executor.execute(prompt, prompt_id, {}, outputs)
    if (why := failure(executor.status_messages)) is not None:
        raise NotRun(why)


@dataclass
class Warming:
    """A workflow that warms this server, and its progress.

    It runs once in ComfyUI's own queue, so that its models and engines are open before real work. It runs as real work
    does, but builds no engine and writes no picture.

    Attributes:
        state: ``waiting``, ``warming``, ``warm`` or ``failed``.
        text: why it failed.
        seconds: how long it ran, once it has ended.
        engine, native: numbers of its calls on engines and native.
        reasons: why native ran them -> the number of calls.
    """

    name: str
    state: str = WAITING
    text: str = ""
    seconds: float = 0.0
    engine: int = 0
    native: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    async def run(self, prompt_id: str, prompt: dict[str, Any], outputs: list[str]) -> None:
        """Run a prompt for warming, before all waiting prompts, and note how it ended.

        Raises:
            NotRun: it failed, was interrupted, or was taken out of the queue.
        """
        server = PromptServer.instance
        number, server.number = -server.number, server.number + 1
        extra = {WARM: True, "create_time": int(1000 * time.time())}
        server.prompt_queue.put((number, prompt_id, prompt, extra, outputs, {}))
        self.state, started = WARMING, time.monotonic()
        while any(item.prompt_id == prompt_id for part in queued() for item in part):
            await asyncio.sleep(POLL_SECONDS)
        status = server.prompt_queue.get_history(prompt_id=prompt_id).get(prompt_id, {}).get("status")
        if not status:
            raise NotRun("It was taken out of ComfyUI's queue or history before its end was seen.")
        if status["status_str"] != "success":
            raise NotRun(failure(status["messages"]) or "ComfyUI does not say why; see the log.")
        for row in prompt_stats(prompt_id):
            self.engine += row.engine
            self.native += row.native
            for why, count in row.reasons.items():
                self.reasons[why] = self.reasons.get(why, 0) + count
        self.state, self.seconds = WARM_NOW, round(time.monotonic() - started, 2)
        log.info("Hybrid TRT: warm for %s: %d calls on engines, %d native", self.name, self.engine, self.native)

    def fail(self, why: str) -> None:
        """Note that the workflow did not warm this server."""
        self.state = FAILED
        self.text = f"{self.name} did not run to its end, so this server is not ready: {why}"
        log.error("Hybrid TRT: %s", self.text)


async def for_warming(workflow: Any) -> tuple[str, dict[str, Any], list[str]]:
    """Return a workflow's prompt for warming: its id, its nodes and its output nodes.

    Raises:
        NotRun: it is no API workflow, or ComfyUI refuses it.
    """
    if not is_prompt(workflow):
        raise NotRun("It is no workflow in API format: save it with Export (API) in ComfyUI.")
    server, prompt = PromptServer.instance, copy.deepcopy(dict(workflow))
    prompt = server.trigger_on_prompt({"prompt": prompt})["prompt"]  # other packs change prompts here
    if (replaced := getattr(server, "node_replace_manager", None)) is not None:
        replaced.apply_replacements(prompt)
    prompt_id, prompt = str(uuid.uuid4()), without_files(prompt)
    return prompt_id, prompt, await _outputs(prompt_id, prompt, None)


def without_files(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Replace output nodes by TRT Report, so that nothing is saved; return the prompt."""
    used = {value[0] for node in prompt.values() for value in node["inputs"].values() if is_link(value)}
    ends = [key for key, node in prompt.items() if key not in used and _is_end(node["class_type"])]
    links = dict.fromkeys((*value,) for end in ends for value in prompt[end]["inputs"].values() if is_link(value))
    kept = {key: node for key, node in prompt.items() if key not in ends}
    for number, link in enumerate(links):
        kept[f"{WARM}_{number}"] = {"class_type": REPORT, "inputs": {"after": list(link), "time_calls": False}}
    return kept


def _is_end(class_type: str) -> bool:
    return bool(getattr(nodes.NODE_CLASS_MAPPINGS.get(class_type), "OUTPUT_NODE", False))


async def _outputs(prompt_id: str, prompt: dict[str, Any], wanted: list[str] | None) -> list[str]:
    """Have ComfyUI check a prompt, and return the output nodes that can run.

    Args:
        wanted: output nodes to choose from; None for all.

    Raises:
        NotRun: the prompt or one of its nodes is refused.
    """
    valid, error, outputs, refused = await validate_prompt(prompt_id, prompt, wanted)
    if (why := _refusal(None if valid else error, refused)) is not None:
        raise NotRun(why)
    return outputs


def _refusal(error: Mapping[str, Any] | None, refused: Mapping[str, Any]) -> str | None:
    """Return why a prompt, or one of its nodes, was refused by ``validate_prompt``; None where all is well.

    Args:
        error: ComfyUI's error on the prompt, or None.
        refused: node id -> ComfyUI's errors on that node.
    """
    for node, found in refused.items():
        if not found.get("errors"):
            continue
        first, where = found["errors"][0], f"{found['class_type']} (node {node})"
        extra = first.get("extra_info", {})
        if first["type"] == "value_not_in_list" and extra["input_name"].endswith("_name"):
            file = extra["received_value"]
            return f"{file} is missing: put it where {where} looks, or choose another file."
        return f"{where}: {first['message']}: {first['details']}."
    return None if error is None else f"{str(error['message']).rstrip('.')}."


def failure(messages: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Return why a prompt that ran failed, from its status messages; None where it did not."""
    for event, data in messages:
        if event == "execution_error":
            what = data["exception_message"].strip() or data["exception_type"]
            return f"{data['node_type']} (node {data['node_id']}): {what.rstrip('.')}."
        if event == "execution_interrupted":
            return "It was interrupted."
    return None
