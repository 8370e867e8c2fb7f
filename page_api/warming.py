"""Warming: a workflow runs once in ComfyUI's own queue, so that its models and engines are open before real work.

It runs as real work does, but builds no engine and writes no picture.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from comfy_execution.graph_utils import is_link
from execution import validate_prompt
from server import PromptServer

import nodes

from ..node_names import REPORT
from ..sampling.call_stats import prompt_stats
from ..saved_workflows.to_prompt import is_prompt
from .build_orders import WARM, queued
from .prompt_errors import failure, refusal

log = logging.getLogger(__name__)

WAITING, WARMING, WARM_NOW, FAILED = "waiting", "warming", "warm", "failed"
POLL_SECONDS = 0.1


class NotWarmed(Exception):
    """A workflow that cannot run; the text says why, in ComfyUI's words."""


@dataclass
class Warming:
    """A workflow that warms this server, and its progress.

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


async def checked(workflow: Any) -> tuple[str, dict[str, Any], list[str]]:
    """Return a workflow's prompt for warming: its id, its nodes and its output nodes.

    Raises:
        NotWarmed: it is no API workflow, or ComfyUI refuses it.
    """
    if not is_prompt(workflow):
        raise NotWarmed("It is no workflow in API format: save it with Export (API) in ComfyUI.")
    server, prompt = PromptServer.instance, copy.deepcopy(dict(workflow))
    prompt = server.trigger_on_prompt({"prompt": prompt})["prompt"]  # other packs change prompts here
    if (replaced := getattr(server, "node_replace_manager", None)) is not None:
        replaced.apply_replacements(prompt)
    prompt_id, prompt = str(uuid.uuid4()), without_files(prompt)
    valid, error, outputs, refused = await validate_prompt(prompt_id, prompt, None)
    if (why := refusal(None if valid else error, refused)) is not None:
        raise NotWarmed(why)
    return prompt_id, prompt, outputs


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


async def run(warming: Warming, prompt_id: str, prompt: dict[str, Any], outputs: list[str]) -> None:
    """Run a prompt for warming, before all waiting prompts, and note how it ended.

    Raises:
        NotWarmed: it failed, was interrupted, or was taken out of the queue.
    """
    server = PromptServer.instance
    number, server.number = -server.number, server.number + 1
    extra = {WARM: True, "create_time": int(1000 * time.time())}
    server.prompt_queue.put((number, prompt_id, prompt, extra, outputs, {}))
    warming.state, started = WARMING, time.monotonic()
    while any(item.prompt_id == prompt_id for part in queued() for item in part):
        await asyncio.sleep(POLL_SECONDS)
    status = server.prompt_queue.get_history(prompt_id=prompt_id).get(prompt_id, {}).get("status")
    if not status:
        raise NotWarmed("It was taken out of ComfyUI's queue or history before its end was seen.")
    if status["status_str"] != "success":
        raise NotWarmed(failure(status["messages"]) or "ComfyUI does not say why; see the log.")
    for row in prompt_stats(prompt_id):
        warming.engine += row.engine
        warming.native += row.native
        for why, count in row.reasons.items():
            warming.reasons[why] = warming.reasons.get(why, 0) + count
    warming.state, warming.seconds = WARM_NOW, round(time.monotonic() - started, 2)
    log.info("Hybrid TRT: warm for %s: %d calls on engines, %d native", warming.name, warming.engine, warming.native)


def fail(warming: Warming, why: str) -> None:
    """Note that a workflow did not warm this server."""
    warming.state = FAILED
    warming.text = f"{warming.name} did not run to its end, so this server is not ready: {why}"
    log.error("Hybrid TRT: %s", warming.text)
