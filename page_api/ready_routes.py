"""Routes for dispatchers of work: they report whether this server is warm, and warm it for a workflow."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from comfy import model_management
from server import PromptServer

from ..backends import backends
from ..comfy_model.comfyui_internals import Feature, switched_off
from ..engine_library.safe_files import NOTES, read_json
from ..sessions.session import open_sessions
from .http import PREFIX, Refused, answer, changes, reads
from .http import read_json as read_body
from .own_prompts import WAITING, WARM_NOW, WARMING, NotRun, Warming, for_warming

log = logging.getLogger(__name__)

VARIABLE = "HYBRID_TRT_WARM"
"""Environment variable: the files of API workflows that warm the server when it starts, as in PATH."""
MAX_WORKFLOW = 32 << 20
MAX_NAME, MAX_WARMED = 200, 100
NEEDED = (Feature.QUEUE, Feature.WARMING)

_warmed: dict[str, Warming] = {}
"""Workflows that warm or have warmed this server, by name; a workflow replaces another of its name."""
FACTS_LAST = 1.0
"""Seconds in which all requests get the same facts, unless a workflow has warmed the server meanwhile."""
_recent: tuple[float, list[str], asyncio.Future[dict[str, Any]]] | None = None
"""Time of the last facts, the states of workflows then, and the facts."""
_turns = asyncio.Lock()
_tasks: set[asyncio.Task] = set()


def register() -> None:
    """Add the routes to ComfyUI's server, and warm it after its start, if requested."""
    server = PromptServer.instance
    if server is None:
        return
    server.routes.get(f"{PREFIX}/ready")(_ready)
    server.routes.post(f"{PREFIX}/warm")(_warm)
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _warmed[name] = Warming(name)
    if _warmed:
        server.app.on_startup.append(_start)


async def _start(_app: web.Application) -> None:
    """Warm with the files that the variable names, one after another; ComfyUI has loaded all packs by now."""
    for order in list(_warmed.values()):
        _in_background(_noted(order, _from_file(order)))


@reads
async def _ready(_request: web.Request) -> web.Response:
    """Answer 200 when the server is warm, else 503, with the data that docs/serving.md lists."""
    found = list(_warmed.values())
    waits_for = [one.text or f"{one.name} is {one.state}." for one in found if one.state != WARM_NOW]
    facts = await _recent_facts([one.state for one in found])
    state = {"ready": not waits_for, "waits_for": waits_for, "warmed": [asdict(one) for one in found], **facts}
    return answer(state, 503 if waits_for else 200)


async def _recent_facts(states: list[str]) -> dict[str, Any]:
    global _recent
    now = time.monotonic()
    if _recent is None or _recent[1] != states or (_recent[2].done() and now - _recent[0] > FACTS_LAST):
        _recent = now, states, asyncio.ensure_future(asyncio.to_thread(_facts))
    return await asyncio.shield(_recent[2])


@changes
async def _warm(request: web.Request) -> web.Response:
    """Warm for a workflow: {"workflow": API prompt, "name": text} -> {"name", "prompt_id"}; /ready has the rest."""
    data = await read_body(request, MAX_WORKFLOW)
    name = data.get("name", "workflow")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise Refused(400, f"The name must be a text of 1 to {MAX_NAME} characters; nothing was done.")
    if why := switched_off(NEEDED):
        raise Refused(409, why[0])
    if name not in _warmed and len(_warmed) >= MAX_WARMED:
        raise Refused(409, f"This server was warmed for {MAX_WARMED} workflows; use the name of one of them again.")
    before = _warmed.get(name)
    if before is not None and before.state in (WAITING, WARMING):
        raise Refused(409, f"{name} is {before.state} already; ask again when it has ended, or use another name.")
    try:
        checked = await for_warming(data.get("workflow"))
    except NotRun as error:
        raise Refused(400, f"The workflow was refused, so nothing was done: {error}") from None
    order = _warmed[name] = Warming(name)
    _in_background(_noted(order, _in_turn(order, *checked)))
    return answer({"name": name, "prompt_id": checked[0]}, 202)


async def _from_file(order: Warming) -> None:
    if why := switched_off(NEEDED):
        raise NotRun(why[0])
    async with _turns:
        try:
            workflow = await asyncio.to_thread(read_json, Path(order.name).absolute(), NOTES)
        except (OSError, ValueError) as error:
            raise NotRun(f"The file cannot be read ({error}); correct {VARIABLE}.") from None
        await order.run(*await for_warming(workflow))


async def _in_turn(order: Warming, prompt_id: str, prompt: dict[str, Any], outputs: list[str]) -> None:
    async with _turns:
        await order.run(prompt_id, prompt, outputs)


async def _noted(order: Warming, work: Awaitable[None]) -> None:
    try:
        await work
    except NotRun as error:
        order.fail(str(error))
    except Exception as error:
        log.exception("Hybrid TRT: warming failed")
        order.fail(f"Hybrid TRT failed ({type(error).__name__}); see the log.")


def _in_background(work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    _tasks.add(task)  # the loop alone would not keep it
    task.add_done_callback(_tasks.discard)


def _facts() -> dict[str, Any]:
    """Return the devices, why each backend does not run here (None where it does), and the engines that are open."""
    device = model_management.get_torch_device()
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    refusals = {name: backend.cannot_run(device) for name, backend in backends().items()}
    return {
        "devices": [torch.cuda.get_device_name(gpu) for gpu in gpus] or [device.type],
        "backends": {name: None if why is None else why.sentence() for name, why in refusals.items()},
        "engines": [engine for session in open_sessions() for engine in _engines(session)],
    }


def _engines(session: Any) -> list[dict[str, Any]]:
    names = [engine.folder.name for engine in session.engines] or [session.active.name]
    return [{"name": name, "backend": session.active.backend_name, "warm": session.loaded} for name in names]
