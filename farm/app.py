"""The Ray Serve application: a gate that takes requests, and workers, each with a ComfyUI and a GPU of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter, Histogram
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from . import access, pictures
from .comfy import Comfy, ComfyLost, Event
from .pictures import Pictures
from .prompts import Prompt, is_prompt, models_key
from .settings import WorkerSettings

log = logging.getLogger("ray.serve")

NAME = "hybrid_trt_farm"
ATTEMPTS = 3
ENDS = ("done", "failed", "refused")
"""Last events of a prompt."""
MAX_BODY = 32 << 20
MODEL_SETS = 3
"""Number of model sets that a worker is assumed to hold: prompts prefer workers with their models."""
_SECONDS = [0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000]


@serve.deployment(max_ongoing_requests=1, health_check_period_s=2, graceful_shutdown_timeout_s=60,
                  max_constructor_retry_count=2)  # fmt: skip
class Worker:
    """One ComfyUI. It takes one prompt at a time; if ComfyUI ends, so does the worker, and Ray starts another."""

    async def __init__(self, settings: WorkerSettings) -> None:
        """Start ComfyUI, and return when it is warm."""
        self.prompts = Counter("hybrid_trt_farm_prompts", "Prompts by how they ended.", ("end",))
        self.calls = Counter("hybrid_trt_farm_calls", "Calls of networks, by who ran them.", ("by",))
        self.seconds = Histogram("hybrid_trt_farm_seconds", "Seconds of a prompt on its worker.", _SECONDS)
        self.comfy: Comfy | None = None
        try:
            self.comfy = Comfy(settings)
            await self.comfy.start()
        except OSError as error:
            why = f"A worker cannot start its ComfyUI ({error}): look at --comfyui, and at the room that --work has."
            raise ComfyLost(why) from None
        except ComfyLost:
            self.comfy.stop()
            raise

    def check_health(self) -> None:
        """Fail once ComfyUI has ended, so that Ray starts another worker."""
        if not self.comfy.alive:
            raise ComfyLost("ComfyUI has ended.")

    @serve.multiplexed(max_num_models_per_replica=MODEL_SETS)
    async def models(self, key: str) -> str:
        """Note that this worker has a set of models from now on: ComfyUI loads them when the prompt runs."""
        return key

    async def render(self, prompt: Prompt, brought: Pictures) -> AsyncIterator[Event]:
        """Run a workflow with its pictures, and yield its events."""
        await self.models(serve.get_multiplexed_model_id())
        began, event = time.monotonic(), {}
        try:
            async with contextlib.aclosing(self.comfy.render(prompt, brought)) as events:
                async for event in events:
                    if event["event"] == "done":
                        event |= {"seconds": round(time.monotonic() - began, 3), "worker": self.comfy.folder.name}
                    yield event
        except ComfyLost as error:
            log.error("%s", error)
            os._exit(1)  # a single way to fail: the gate sees a dead worker, and Ray starts another
        finally:
            self._count(event, time.monotonic() - began)

    def _count(self, event: Event, seconds: float) -> None:
        self.prompts.inc(1, {"end": event.get("event", "cancelled")})
        if event.get("event") == "done":
            self.seconds.observe(seconds)
            rows = [row for report in event["report"] for row in report["rows"]]
            for by in ("engine", "native"):
                if calls := sum(row[by] for row in rows):
                    self.calls.inc(calls, {"by": by})

    def __del__(self) -> None:
        if self.comfy is not None:
            self.comfy.stop()


@serve.deployment(max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=5,
                  logging_config={"enable_access_log": False})  # fmt: skip
class Gate:
    """Entry of all requests: it checks token and request, and passes prompts to workers, again if a worker dies."""

    def __init__(self, worker: DeploymentHandle, token_digest: str) -> None:
        self.worker = worker
        self.token_digest = token_digest
        self.rendering = 0
        self.draining = False

    async def __call__(self, request: Request) -> Response:
        """Answer ``GET /ready`` and ``POST /render``."""
        route = (request.method, request.url.path)
        if route == ("GET", "/ready"):
            return await self._ready()
        if not access.admits(request.headers.get("authorization"), self.token_digest):
            return _refusal(401, "The token is missing or wrong: send it as 'Authorization: Bearer TOKEN'.")
        if route != ("POST", "/render"):
            return _refusal(404, "The farm answers GET /ready and POST /render.")
        return await self._render(request)

    async def drain(self) -> int:
        """Take no more prompts, and return how many run."""
        self.draining = True
        return self.rendering

    async def _ready(self) -> Response:
        states = (await asyncio.to_thread(serve.status)).applications[NAME].deployments["Worker"].replica_states
        workers = states.get("RUNNING", 0)
        ready = workers > 0 and not self.draining
        state = {"ready": ready, "workers": workers, "states": states, "rendering": self.rendering}
        return JSONResponse(state, 200 if ready else 503)

    async def _render(self, request: Request) -> Response:
        try:
            body = await _body(request)
            prompt = body["workflow"]
        except (ValueError, TypeError, KeyError, RecursionError):
            prompt = None
        if self.draining:
            return _refusal(503, "The farm shuts down and takes no more prompts.")
        if not is_prompt(prompt):
            return _refusal(400, f'Send {{"workflow": ...}} in API format, {MAX_BODY >> 20} MB at most with pictures.')
        try:
            brought = await asyncio.to_thread(pictures.read, body.get("inputs"), prompt)
        except ValueError as error:
            return _refusal(400, str(error))
        events = self._events(prompt, brought)
        first = await anext(events)  # decides the status
        while first["event"] == "worker died":
            first = await anext(events)
        if first["event"] == "refused":
            await events.aclose()
            return JSONResponse({"error": first["error"], "node_errors": first["node_errors"]}, 400)
        return StreamingResponse(_lines(first, events), media_type="application/x-ndjson")

    async def _events(self, prompt: Prompt, brought: Pictures) -> AsyncIterator[Event]:
        """Yield a prompt's events; if its worker dies, another worker runs it from the start."""
        worker = self.worker.options(stream=True, multiplexed_model_id=models_key(prompt))
        self.rendering += 1
        try:
            for attempt in range(1, ATTEMPTS + 1):
                event: Event = {}
                running = worker.render.remote(prompt, brought)
                try:
                    async for event in running:
                        yield event | ({"attempts": attempt} if event["event"] == "done" else {})
                    return
                except RayActorError:
                    if event.get("event") in ENDS:  # its prompt had already ended
                        return
                    log.warning("A worker died while it ran a prompt (attempt %d of %d).", attempt, ATTEMPTS)
                    yield {"event": "worker died", "attempt": attempt}
                except RayTaskError as error:
                    log.error("A worker failed: %s", error)
                    why = f"The worker failed ({type(error.cause).__name__}); see the log."
                    yield {"event": "failed", "error": why}
                    return
                finally:  # Ray itself does so only if it is the first to see that the client left
                    running.cancel()
            yield {"event": "failed", "error": f"{ATTEMPTS} workers died while they ran this prompt; see their logs."}
        finally:
            self.rendering -= 1


async def _body(request: Request) -> Any:
    """Return the JSON of a request.

    Raises:
        ValueError: it is no JSON, or too large.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ValueError("too large")
        parts.append(part)
    return await asyncio.to_thread(json.loads, b"".join(parts))


async def _lines(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    yield json.dumps(first) + "\n"
    async for event in events:
        yield json.dumps(event) + "\n"


def _refusal(status: int, text: str) -> Response:
    return JSONResponse({"error": {"message": text}}, status)


def application(settings: WorkerSettings, token_digest: str, workers: int, gpus: float) -> serve.Application:
    """Return the application: one gate, and workers with so many GPUs each."""
    # in a single thread, a prompt whose client left counts, and keeps others off, until it has really ended
    apart = {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}}
    options = {"num_cpus": 0, "num_gpus": gpus, "runtime_env": apart}
    worker = Worker.options(num_replicas=workers, ray_actor_options=options).bind(settings)
    return Gate.bind(worker, token_digest)
