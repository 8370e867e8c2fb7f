"""The library and the builds of this ComfyUI: one queue, states of nodes, messages to the page."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from server import PromptServer

from ..comfy_model import hash_cache
from ..engine_builder import gpu_room
from ..engine_builder.command_line.comfyui import library_folders
from ..engine_builder.jobs import BuildQueue, Job, State
from ..engine_library import Library
from .build_orders import PendingOrders
from .node_states import NodeStates

EVENT = "hybrid_trt.build"
"""The event that tells the page of a job's change: ``Job.to_json`` with the keys of the nodes that wait for it."""


def library() -> Library:
    """Return the library of this ComfyUI, wherever its settings put ``models/trt_engines``."""
    return _library(tuple(library_folders()))


@cache
def _library(roots: tuple[Path, ...]) -> Library:
    found = Library(roots)
    found.sweep()
    hash_cache.use(roots[0])
    return found


builds = BuildQueue(gpu_room.make_room)
node_states = NodeStates(library(), builds)
pending_orders = PendingOrders()

_ended = _to_do = 0


def ended() -> int:
    """Return the number of builds that have ended."""
    return _ended


def to_do() -> int:
    """Return the number of builds that were cancelled or left to another machine: 'build first' orders them again."""
    return _to_do


def _on_change(job: Job) -> None:
    """Tell the page, with the keys of the nodes that ordered the job."""
    global _ended, _to_do
    if job.state.final:
        _ended += 1
        _to_do += job.state is State.CANCELLED or job.elsewhere
        node_states.ended(job)
    if PromptServer.instance is not None:
        PromptServer.instance.send_sync(EVENT, {**job.to_json(), "keys": node_states.keys_of(job)})


builds.subscribe(_on_change)
