"""The library for the page: list, verify, delete, export, import. Engines are only ever found by listing the library,
so nothing outside it can be named."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import folder_paths
from aiohttp import web
from comfy import model_management
from server import PromptServer

from ..backends import gpu_of
from ..backends.lookup import refusals
from ..comfy_model.hash_cache import source_changed
from ..engine_library import inventory, last_use
from ..engine_library.archive import SUFFIX, export_engine, import_engine
from ..engine_library.disk import check_room, free_bytes, readable
from ..sessions.session import open_engines
from .http import PREFIX, Refused, changes, read_json, reads
from .library_folder import library
from .node_states import engine_json

EVENT = "hybrid_trt.library"
"""Tells every page that the library has changed."""
EXPORTS = "trt_engines"
"""Folder below ComfyUI's output folder, from where ComfyUI's own /view serves the file."""
MAX_IMPORT = 64 << 30


def register(routes: web.RouteTableDef) -> None:
    """Add the routes."""
    routes.get(f"{PREFIX}/engines")(_list)
    routes.post(f"{PREFIX}/engines/import")(_import)
    routes.post(f"{PREFIX}/engines/delete_unused")(_delete_unused)
    routes.post(f"{PREFIX}/engines/{{name}}/verify")(_verify)
    routes.post(f"{PREFIX}/engines/{{name}}/export")(_export)
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


@changes
async def _delete_unused(request: web.Request) -> web.Response:
    """Delete what was not used for some days: {"days": 30} -> {"deleted": names, "bytes": freed}."""
    data = await read_json(request)
    days = data.get("days")
    if set(data) != {"days"} or isinstance(days, bool) or not isinstance(days, int | float) or not 1 <= days <= 36500:
        raise Refused(400, "The request needs days, a number from 1 to 36500, and nothing else; nothing was deleted.")
    removed, kept = await asyncio.to_thread(_remove_unused, days)
    if kept and not removed:
        raise Refused(409, f"{kept[0].name} could not be deleted; it is in use, or its folder is read-only.")
    tell()
    return web.json_response({
        "deleted": [entry.name for entry in removed], "bytes": sum(entry.bytes for entry in removed)
    })  # fmt: skip


def _remove_unused(days: float) -> tuple[list[inventory.Entry], list[inventory.Entry]]:
    in_use = {engine.folder for engine in open_engines()}
    return inventory.delete_unused(_entries(), days, in_use)


@changes
async def _export(request: web.Request) -> web.Response:
    """Write an engine as one file into ComfyUI's output folder."""
    entry = await _entry(request)
    if entry.engine is None:
        raise Refused(409, f"{entry.name} has no readable manifest, so it was not exported; delete it.")
    folder = Path(folder_paths.get_output_directory()) / EXPORTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = await asyncio.to_thread(export_engine, entry.engine, folder)
    except OSError as error:
        raise Refused(409, f"The engine could not be exported to {folder} ({error.strerror or error}); nothing was "
                           "changed in the library.") from error
    return web.json_response({"filename": file.name, "subfolder": EXPORTS, "bytes": file.stat().st_size})


@changes
async def _import(request: web.Request) -> web.Response:
    """Take an exported engine as the request's body. It is checked before the library changes."""
    size = request.content_length
    if size is None:
        raise Refused(411, "The request does not say how large the file is, so it was not read.")
    if not 0 < size <= MAX_IMPORT:
        raise Refused(413, f"A file of {size} bytes is no engine, so it was not read.")
    root = library().roots[0]
    check_room(root, 2 * size, "Importing an engine")
    folder = library().building_folder()
    try:
        file = folder / f"upload{SUFFIX}"
        with file.open("xb") as out:
            received = 0
            async for chunk in request.content.iter_chunked(1 << 20):
                received += len(chunk)
                if received > size:
                    raise Refused(413, "The file is larger than announced, so it was not imported.")
                await asyncio.to_thread(out.write, chunk)
        engine = await asyncio.to_thread(import_engine, library(), file)
    except OSError as error:
        raise readable(error, root) from error
    finally:
        library().discard(folder)
    tell()
    return web.json_response(engine_json(engine))


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
        manifest, since = entry.engine.manifest, last_use.unused_since(entry.engine)
        data = {**engine_json(entry.engine), "kind": manifest.kind, "architecture": manifest.identity.architecture,
                "unused_since": since.isoformat(timespec="seconds") if since is not None else None,
                "read_only": not os.access(entry.folder.parent, os.W_OK), **data}  # fmt: skip
    return data


def tell() -> None:
    """Let every page ask for the lists again."""
    if PromptServer.instance is not None:
        PromptServer.instance.send_sync(EVENT, {})
