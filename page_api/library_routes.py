"""The library for the page: list, verify, delete. Engines are found by listing it, so nothing outside can be named."""

from __future__ import annotations

import asyncio
import os

from aiohttp import web
from comfy import model_management
from server import PromptServer

from ..backends import gpu_of
from ..backends.lookup import refusals
from ..comfy_model.hash_cache import source_changed
from ..engine_library import inventory
from ..engine_library.disk import free_bytes
from .http import PREFIX, Refused, changes, reads
from .library_folder import library
from .node_states import engine_json

EVENT = "hybrid_trt.library"
"""Tells every page that the library has changed."""


def register(routes: web.RouteTableDef) -> None:
    """Add the routes."""
    routes.get(f"{PREFIX}/engines")(_list)
    routes.post(f"{PREFIX}/engines/{{name}}/verify")(_verify)
    routes.delete(f"{PREFIX}/engines/{{name}}")(_delete)


@reads
async def _list(_request: web.Request) -> web.Response:
    found = await asyncio.to_thread(_entries)
    root = library().roots[0]
    return web.json_response({
        "folder": str(root),
        "bytes": sum(entry.bytes for entry in found),
        "free": free_bytes(root),
        "engines": [_entry_json(entry) for entry in found],
    })


@changes
async def _verify(request: web.Request) -> web.Response:
    """Read and hash all files of an engine."""
    flaw = await asyncio.to_thread(inventory.verify, await _entry(request))
    return web.json_response({"ok": flaw is None, "text": "" if flaw is None else str(flaw)})


@changes
async def _delete(request: web.Request) -> web.Response:
    entry = await _entry(request)
    await asyncio.to_thread(inventory.delete, entry)
    tell()
    return web.json_response({"deleted": entry.name, "bytes": entry.bytes})


def _entries() -> list[inventory.Entry]:
    device = model_management.get_torch_device()
    return inventory.entries(library(), refusals(device), source_changed, gpu_of(device))


async def _entry(request: web.Request) -> inventory.Entry:
    """The engine that the path names, by its exact name."""
    name = request.match_info["name"]
    found = next((e for e in await asyncio.to_thread(_entries) if e.name == name), None)
    if found is None:
        raise Refused(404, f"There is no engine {name[:120]!r} in the library; nothing was done.")
    return found


def _entry_json(entry: inventory.Entry) -> dict:
    data = {"name": entry.name, "state": entry.state, "reason": entry.reason, "bytes": entry.bytes,
            "last_used": entry.last_used}  # fmt: skip
    if entry.engine is not None:
        manifest = entry.engine.manifest
        data = {**engine_json(entry.engine), "kind": manifest.kind, "architecture": manifest.identity.architecture,
                "read_only": not os.access(entry.folder.parent, os.W_OK), **data}  # fmt: skip
    return data


def tell() -> None:
    """Let every page ask for the lists again."""
    if PromptServer.instance is not None:
        PromptServer.instance.send_sync(EVENT, {})
