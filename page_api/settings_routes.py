"""The library's settings for the page's settings dialog."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict

from aiohttp import web

from ..engine_library.settings import Settings, read_settings, write_settings
from .http import PREFIX, Refused, changes, read_json, reads
from .library_folder import FOLDER_KEY, library

MAX_BODY = 1 << 20

_writing = threading.Lock()
"""Two tabs may change a setting each at the same moment: none is lost."""


def register(routes: web.RouteTableDef) -> None:
    """Add the routes."""
    routes.get(f"{PREFIX}/settings")(_show)
    routes.post(f"{PREFIX}/settings")(_change)


@reads
async def _show(_request: web.Request) -> web.Response:
    return web.json_response(await asyncio.to_thread(_settings))


@changes
async def _change(request: web.Request) -> web.Response:
    """Change some settings; a build that starts from now on keeps them."""
    data = await read_json(request, MAX_BODY)
    if "folder" in data:
        raise Refused(
            409,
            "The library's folder cannot be changed while ComfyUI runs, so nothing was changed; write it under "
            f"'{FOLDER_KEY}' in extra_model_paths.yaml and restart.",
        )
    names = asdict(Settings()).keys()
    if not data or not data.keys() <= names:
        raise Refused(400, f"The request needs some of {', '.join(names)} and nothing else; nothing was changed.")
    await asyncio.to_thread(_write, data)
    return web.json_response(await asyncio.to_thread(_settings))


def _write(data: dict) -> None:
    root = library().roots[0]
    with _writing:
        write_settings(root, Settings.from_json({**asdict(read_settings(root)), **data}))


def _settings() -> dict:
    roots = library().roots
    return {"folders": [str(root) for root in roots], **asdict(read_settings(roots[0]))}
