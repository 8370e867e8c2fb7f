"""Status of a node's engine in words, and missing engines for the calls of the graph and the last run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..architectures.calls import RequestedCalls, UncoveredCall
from ..backends import BuildSizes, backends
from ..comfy_model.attention import remark
from ..engine_library import Engine
from .call_stats import last_run
from .engine_handle import EngineHandle


def requested_calls(handle: EngineHandle) -> RequestedCalls:
    """Return the calls that a node needs engines for: by its settings, its graph and its last run."""
    run = last_run(handle.node_key) if handle.node_key else None
    if run is None:
        return RequestedCalls(handle.choice.profile, handle.choice.pictures)
    calls: Counter[UncoveredCall] = Counter()
    for row in run[1]:
        calls.update(row.uncovered.copy())  # a run may be under way
    seen = [dict(call.sizes) for call, _ in calls.most_common()]
    return RequestedCalls(handle.choice.profile, handle.choice.pictures, seen)


def lacks_engine(handle: EngineHandle) -> bool:
    """Tell whether a build would serve more calls than now, or faster."""
    if handle.session is None:
        return handle.fallback.reason.a_build_ends_it
    return bool(to_build(handle))


def to_build(handle: EngineHandle, rebuild: Sequence[Engine] = ()) -> list[BuildSizes]:
    """List the sizes to build for a node; engines of other backends keep the calls that they serve."""
    calls = requested_calls(handle)
    return handle.found.to_build(handle.network, calls, rebuild)


def lacks_pictures(handle: EngineHandle) -> bool:
    """Tell whether pictures of the graph run native."""
    if handle.session is None:
        return True
    architecture, profile = handle.network.architecture(), handle.choice.profile
    calls = [architecture.calls(profile, picture) for picture in handle.choice.pictures]
    return any(handle.session.serves(own[0]) is not None for own in calls if own)


def status(handle: EngineHandle) -> str:
    """Return one sentence for the node."""
    session, network = handle.session, handle.network
    if session is None:
        return f"{handle.fallback.sentence()} {handle.note}".strip()
    text = session.status(handle.choice.profile)
    if session.engines and session.refusal is None:
        if any(part.calls for part in to_build(handle)):
            already = ": already faster" if network.device.type == "cuda" else ""
            text += f". Not compiled yet{already}; build for full speed"
        name = session.engines[0].manifest.identity.backend
        if notice := backends()[name].notice:
            text += f". {name} is {notice}"
        if handle.choice.replaceable and not session.follows_patches and not handle.found.refits:
            text += f". {name} has no engines for any checkpoint and LoRA: this one is for this model only"
    its = remark(network.parts[0].module, network.patcher, network.prefix, session.calls_attention)
    return ". ".join(filter(None, (text, its, handle.note)))
