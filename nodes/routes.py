"""What the page can ask the server about builds; all below /hybrid_trt/builds."""

from __future__ import annotations

from aiohttp import web
from server import PromptServer

from ..engine_builder.jobs import Job
from .building import builds

PREFIX = "/hybrid_trt/builds"


def register() -> None:
    """Add the routes to ComfyUI's server."""
    routes = PromptServer.instance.routes
    routes.get(PREFIX)(_list)
    routes.get(PREFIX + "/{id}")(_show)
    routes.post(PREFIX + "/{id}/cancel")(_cancel)


async def _list(_request: web.Request) -> web.Response:
    return web.json_response([job.to_json() for job in builds.jobs()])


async def _show(request: web.Request) -> web.Response:
    """A job with its log."""
    job = _job(request)
    return web.json_response({**job.to_json(), "log": list(job.log)})


async def _cancel(request: web.Request) -> web.Response:
    job = _job(request)
    return web.json_response({"cancelled": builds.cancel(job), **job.to_json()})


def _job(request: web.Request) -> Job:
    job = builds.get(request.match_info["id"])
    if job is None:
        raise web.HTTPNotFound(text="There is no such build; the server has restarted or forgotten it.")
    return job
