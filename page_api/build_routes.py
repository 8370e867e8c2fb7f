"""Routes of builds and nodes, all below /hybrid_trt. A route that changes something says so by ``changes``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from aiohttp import web
from server import PromptServer

from ..engine_builder.jobs import Job
from ..node_names import ENGINE_NODES
from ..saved_workflows.accelerate import accelerate, remove
from ..saved_workflows.graph import Workflow, WorkflowError, as_workflow_error, change
from . import panel_routes
from .builds import builds, node_states, pending_orders
from .graph_pictures import called_with, pictures_of, readers_of, samplers_of
from .http import PREFIX, Refused, answer, changes, read_json, reads, strict_json
from .outlook import request_of
from .workflow_graph import BadPrompt, class_of, for_one_network, network_inputs, node_key

MAX_NODES = 500
MAX_WORKFLOW = 32 << 20
"""Most bytes of a workflow: notes and other packs' nodes may hold pictures."""


def register() -> None:
    """Add the routes to ComfyUI's server."""
    if PromptServer.instance is None:
        return
    routes = PromptServer.instance.routes
    routes.get(f"{PREFIX}/builds")(_list)
    routes.post(f"{PREFIX}/builds/clear")(_clear)
    routes.get(f"{PREFIX}/builds/{{id}}")(_show)
    routes.post(f"{PREFIX}/builds/{{id}}/cancel")(_cancel)
    routes.post(f"{PREFIX}/nodes")(_nodes)
    routes.post(f"{PREFIX}/accelerate")(_accelerate)
    panel_routes.register(routes)


@reads
async def _list(_request: web.Request) -> web.Response:
    return answer([job.to_json() for job in builds.jobs() if not job.cleared])


@reads
async def _show(request: web.Request) -> web.Response:
    """Answer with a job and its log."""
    job = _job(request)
    return answer({**job.to_json(), "log": list(job.log)})


@changes
async def _clear(_request: web.Request) -> web.Response:
    """Remove ended builds from the list; nodes still report the results of theirs."""
    cleared = builds.clear_ended()
    panel_routes.tell()
    return answer({"cleared": cleared})


@changes
async def _cancel(request: web.Request) -> web.Response:
    job = _job(request)
    return answer({"cancelled": builds.cancel(job), **job.to_json()})


@reads
async def _nodes(request: web.Request) -> web.Response:
    """Answer with the states of engine nodes: {"prompt": API prompt of the whole graph, "nodes": ids} ->
    {"nodes": {id: state}, "orders": {prompt id: keys of the nodes whose builds it has yet to order}}.

    A node of a subgraph that is used several times has a list of ids in place of an id. With "workflow", an id, the
    last runs of other workflows are left out.
    """
    data = await read_json(request)
    prompt, nodes = data.get("prompt"), data.get("nodes")
    nodes = [uses if isinstance(uses, list) else [uses] for uses in nodes] if isinstance(nodes, list) else None
    if not isinstance(prompt, dict) or nodes is None or sum(map(len, nodes)) > MAX_NODES:
        raise Refused(400, f"The request needs a prompt and a list of at most {MAX_NODES} nodes; nothing was done.")
    return answer(await asyncio.to_thread(_answer, prompt, nodes, str(data.get("workflow") or "")))


def _answer(prompt: dict, nodes: list[list], workflow: str) -> dict[str, dict]:
    orders = pending_orders.by_prompt()  # first: an order that starts meanwhile shows as its job
    return {"nodes": states(prompt, nodes, workflow), "orders": orders}


def states(prompt: Mapping[str, Any], nodes: list[list], workflow: str = "") -> dict[str, dict]:
    """Return the states of engine nodes by id; ``nodes`` lists the ids of each node's uses."""
    for node in chain(*nodes):
        if not isinstance(node, str) or class_of(prompt, node) not in ENGINE_NODES:
            raise Refused(400, f"{str(node)[:80]!r} is no engine node of the prompt; nothing was done.")
    found, readers = {}, readers_of(prompt)
    for uses in nodes:
        samplers = {node: tuple(samplers_of(prompt, node, readers)) for node in uses}
        every = tuple(dict.fromkeys(chain(*samplers.values())))
        of_all = pictures_of(prompt, every)
        for node in uses:
            asked = {"of_all_uses": of_all, "samplers": every, "workflow": workflow}
            sampled = pictures_of(prompt, samplers[node])
            try:
                first, *others = (
                    _state(prompt, node, name, {**asked, "pictures": called_with(prompt, node, name, sampled)})
                    for name in network_inputs(prompt, node)
                )
            except BadPrompt as error:
                raise Refused(400, f"The state is not known: {error}.") from None
            found[node] = {**first, **({"others": others} if others else {})}
    return found


def _state(prompt: Mapping[str, Any], node: str, input_name: str, asked: Mapping[str, Any]) -> dict:
    """Return the state of a node for the network of one input; ``asked``: fields of ``NodeRequest`` about the graph."""
    prompt = for_one_network(prompt, node, input_name)
    key = node_key(prompt, node)  # first: it raises for malformed nodes
    return {**node_states.state(key, replace(request_of(prompt, node), **asked)), "input": input_name}


@reads
async def _accelerate(request: web.Request) -> web.Response:
    """Accelerate a workflow: {"workflow": saved, "what": "add" or "remove"} -> {"workflow": changed,
    "count": of nodes, "added": their ids, "left": a sentence on parts left alone}. The server keeps nothing.
    """
    data = await read_json(request, MAX_WORKFLOW)
    workflow, what = data.get("workflow"), data.get("what")
    if not isinstance(workflow, dict) or what not in ("add", "remove"):
        raise Refused(400, "The request needs a workflow, and 'add' or 'remove' as what to do; nothing was done.")
    try:
        text = await asyncio.to_thread(_changed, workflow, what)
    except WorkflowError as error:
        raise Refused(400, f"The workflow was left as it is: {error}.") from None
    return web.json_response(text=text)


def _changed(workflow: dict[str, Any], what: str) -> str:
    with as_workflow_error():  # it may have numbers that JSON has not
        nodes = change(workflow, accelerate if what == "add" else remove)
        added = [node["id"] for node in nodes] if what == "add" else []
        left = change(workflow, Workflow.left_alone)
        return strict_json({"workflow": workflow, "count": len(nodes), "added": added, "left": left})


def _job(request: web.Request) -> Job:
    job = builds.get(request.match_info["id"])
    if job is None:
        raise Refused(404, "There is no such build; the server has restarted or forgotten it.")
    return job
