"""Lets a test read the main memory that a server holds, without what the server has freed."""

from __future__ import annotations

import ctypes
import gc

from aiohttp import web
from server import PromptServer


def add_route() -> None:
    PromptServer.instance.routes.post("/comfy_test_nodes/trim")(_trim)


async def _trim(_request: web.Request) -> web.Response:
    """Give freed memory back to the system: glibc keeps it in the arena of each thread, hundreds of megabytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return web.json_response({})
