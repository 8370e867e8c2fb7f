"""The library's settings for the page's settings dialog."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ..engine_library.settings import Settings, read_settings, write_settings
from .http import PREFIX, Refused, changes, read_json, reads
from .library_folder import FOLDER_KEY, library

MAX_BODY = 1 << 20


def register(routes: web.RouteTableDef) -> None:
    """Add the routes."""
    routes.get(f"{PREFIX}/settings")(_show)
    routes.post(f"{PREFIX}/settings")(_change)


@reads
async def _show(_request: web.Request) -> web.Response:
    return web.json_response(await asyncio.to_thread(_settings))


@changes
async def _change(request: web.Request) -> web.Response:
    """Change the limit; a build that starts from now on keeps it."""
    data = await read_json(request, MAX_BODY)
    if "folder" in data:
        raise Refused(
            409,
            "The library's folder cannot be changed while ComfyUI runs, so nothing was changed; write it under "
            f"'{FOLDER_KEY}' in extra_model_paths.yaml and restart.",
        )
    if set(data) != {"limit_gb"}:
        raise Refused(400, "The request needs limit_gb and nothing else; nothing was changed.")
    settings = Settings.from_json(data)
    await asyncio.to_thread(write_settings, library().roots[0], settings)
    return web.json_response(await asyncio.to_thread(_settings))


def _settings() -> dict:
    roots = library().roots
    return {"folders": [str(root) for root in roots], "limit_gb": read_settings(roots[0]).limit_gb}
