"""Routes of the panel: the library, its settings, and the report for support.

Engines are found only by listing the library, so a request can name nothing outside it.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import folder_paths
from aiohttp import web
from comfy import model_management
from comfy.cli_args import args, parser
from server import PromptServer

from ..architectures import presets
from ..backends import AUTO, backends
from ..backends.lookup import refusals
from ..comfy_model.comfyui_internals import switched_off
from ..comfy_model.hash_cache import source_changed
from ..engine_builder.command_line.comfyui import FOLDER_KEY
from ..engine_builder.doctor import KeptWarnings, Place, as_text, report
from ..engine_library import Manifest, Reason, inventory
from ..engine_library.disk import Settings, free_bytes, read_settings, write_settings
from ..engine_library.gpu import gpu_of
from .builds import builds, library
from .http import PREFIX, Refused, answer, changes, read_json, reads
from .node_states import engine_json

EVENT = "hybrid_trt.library"
"""Tells every page that the library has changed."""
MAX_BODY = 1 << 20

_writing = threading.Lock()
"""Keeps both changes when two tabs change a setting each at the same moment."""
_warnings = KeptWarnings()


def register(routes: web.RouteTableDef) -> None:
    """Add the routes."""
    routes.get(f"{PREFIX}/engines")(_list)
    routes.post(f"{PREFIX}/engines/{{name}}/verify")(_verify)
    routes.delete(f"{PREFIX}/engines/{{name}}")(_delete)
    routes.get(f"{PREFIX}/presets")(_presets)
    routes.get(f"{PREFIX}/settings")(_show)
    routes.post(f"{PREFIX}/settings")(_change)
    routes.get(f"{PREFIX}/doctor")(_report)


@reads
async def _list(_request: web.Request) -> web.Response:
    found = await asyncio.to_thread(_entries)
    root = library().roots[0]
    return answer({
        "folder": str(root),
        "bytes": sum(entry.bytes for entry in found),
        "free": free_bytes(root),
        "engines": [_entry_json(entry) for entry in found],
    })


@changes
async def _verify(request: web.Request) -> web.Response:
    """Read and hash all files of an engine."""
    fault = await asyncio.to_thread(inventory.verify, await _entry(request))
    return answer({"ok": fault is None, "text": "" if fault is None else str(fault)})


@changes
async def _delete(request: web.Request) -> web.Response:
    entry = await _entry(request)
    await asyncio.to_thread(inventory.delete, entry)
    tell()
    return answer({"deleted": entry.name, "bytes": entry.bytes})


def _entries() -> list[inventory.Entry]:
    device = model_management.get_torch_device()
    return inventory.entries(library(), refusals(device), source_changed, gpu_of(device))


async def _entry(request: web.Request) -> inventory.Entry:
    """Return the engine that the path names, by its exact name."""
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
                "outdated": _is_outdated(manifest), **data}  # fmt: skip
    return data


def _is_outdated(manifest: Manifest) -> bool:
    """Tell whether an engine for this GPU is of an earlier version of its backend, or of the pack, and so unused."""
    identity, device = manifest.identity, model_management.get_torch_device()
    backend = backends().get(identity.backend)
    if backend is None or backend.cannot_run(device) is not None or identity.device != backend.target(device):
        return False
    refusal = backend.cannot_use(manifest, device)
    older = identity.backend_version != backend.version()
    return older and refusal is not None and refusal.reason is Reason.STALE_ENGINE


def tell() -> None:
    """Let every page ask for the lists again."""
    if PromptServer.instance is not None:
        PromptServer.instance.send_sync(EVENT, {})


@reads
async def _presets(_request: web.Request) -> web.Response:
    found = ({"key": key, "family": family, "sizes": asdict(sizes)} for key, (family, sizes) in presets().items())
    return answer(list(found))


@reads
async def _show(_request: web.Request) -> web.Response:
    return answer(await asyncio.to_thread(_settings))


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
    return answer(await asyncio.to_thread(_settings))


def _write(data: dict) -> None:
    root = library().roots[0]
    with _writing:
        write_settings(root, Settings.from_json({**asdict(read_settings(root)), **data}))


def _settings() -> dict:
    roots = library().roots
    offered = {"folders": [str(root) for root in roots], "backends": [AUTO, *backends()]}
    return {**offered, **asdict(read_settings(roots[0]))}


@changes
async def _report(_request: web.Request) -> web.Response:
    """Answer with the report. It changes nothing, yet only ComfyUI's own page may know."""
    return web.json_response({"text": await asyncio.to_thread(_report_text)})


def _report_text() -> str:
    folder = Path(folder_paths.__file__).parent
    place = Place(folder, library(), model_management.get_torch_device, _options(), switched_off, builds.jobs())
    return as_text(report(place, lambda: _warnings.lines))


def _options() -> list[str]:
    """Return ComfyUI's options that differ from the defaults, without texts: these may be folders or addresses."""
    usual, found = parser.parse_args([]), []
    for name, value in vars(args).items():
        before = getattr(usual, name, None)
        if value != before and (value or before):  # ComfyUI makes an empty set of a list without entries
            option = f"--{name.replace('_', '-')}"
            found.append(option if value is True else f"{option} {_shown(value)}")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value) if isinstance(value, bool | int | float) else "..."
