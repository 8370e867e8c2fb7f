"""Route of the report for support, for the panel's button."""

from __future__ import annotations

import asyncio
from enum import Enum
from pathlib import Path
from typing import Any

import folder_paths
from aiohttp import web
from comfy import model_management
from comfy.cli_args import args, parser
from server import PromptServer

from ..comfy_model.comfyui_internals import switched_off
from ..engine_builder.doctor import KeptWarnings, ReportContext, as_text, report
from .builds import builds
from .http import PREFIX, changes
from .library_folder import library

_warnings = KeptWarnings()


def register() -> None:
    """Add the route to ComfyUI's server, and keep the pack's warnings from now on."""
    if PromptServer.instance is None:
        return
    _warnings.start()
    PromptServer.instance.routes.get(f"{PREFIX}/doctor")(_show)


@changes
async def _show(_request: web.Request) -> web.Response:
    """Send the report. It changes nothing, yet only ComfyUI's own page may read it."""
    return web.json_response({"text": await asyncio.to_thread(_text)})


def _text() -> str:
    folder, data = Path(folder_paths.__file__).parent, Path(folder_paths.base_path)
    place = ReportContext(
        folder, library(), model_management.get_torch_device, data, _options(), switched_off, builds.jobs()
    )
    return as_text(report(place, lambda: _warnings.lines))


def _options() -> list[str]:
    """Return the options that ComfyUI was started with, without texts, which may be folders or addresses."""
    usual, given = parser.parse_args([]), []
    for name, value in vars(args).items():
        before = getattr(usual, name, None)
        if value != before and (value or before):  # ComfyUI makes an empty set of a list that nobody gave
            option = f"--{name.replace('_', '-')}"
            given.append(option if value is True else f"{option} {_shown(value)}")
    return given


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value) if isinstance(value, bool | int | float) else "..."
