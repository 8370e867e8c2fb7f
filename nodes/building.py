"""Builds that the engine nodes order or wait for: the meaning of ``when_missing``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from comfy import model_management
from comfy import utils as comfy_utils

from ..backends import AUTO, BuildSizes
from ..backends.lookup import builds_by_itself
from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.network import NativeNetwork
from ..engine_builder import gpu_room
from ..engine_builder.jobs import Job, State
from ..engine_builder.order import BuildOrder
from ..engine_library import Engine, Fallback, Reason, Unavailable
from ..engine_library.manifest import MANIFEST_NAME
from ..node_names import BUILD_NOW, IN_BACKGROUND, USE_NATIVE
from ..page_api.build_orders import running_orders, running_pictures, warms
from ..page_api.builds import builds, ended, node_states, to_do
from ..sampling.call_stats import ever_uncovered
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import lacks_engine, to_build
from ..sampling.run_context import executing

NO_BUILDS = "This ComfyUI cannot build it, the command line can; the log says why."

_found: dict[Path, Engine] = {}  # the engines that nodes have found
_losses = 0  # how many of them were gone afterwards
_left_out = 0  # builds that were not ordered, because the prompt was for warming


def meaning(when_missing: str, network: NativeNetwork, backend: str) -> str:
    """Return what a node's choice means for a network: auto builds in the background where that disturbs nothing."""
    if when_missing != AUTO:
        return when_missing
    try:
        architecture = network.architecture().name
    except Unavailable:
        return USE_NATIVE
    meanwhile = builds_by_itself(backend, network.device, architecture)
    return IN_BACKGROUND if meanwhile else USE_NATIVE


def build(handle: EngineHandle, when_missing: str | None, again: bool = False) -> None:
    """Order a handle's builds, and wait for them with *build now*. A prompt for warming orders nothing.

    Args:
        when_missing: None for a user who pressed the button: earlier failures do not matter, and engines that could
            not be opened are built again.
        again: build engines anew where none is missing; only for that user.
    """
    global _left_out
    if not works(Feature.BUILDS):
        handle.note = NO_BUILDS
        return
    orders = _orders(handle, again, pressed=when_missing is None)
    if when_missing is not None and (context := executing()) is not None and warms(context.prompt_id):
        _left_out += bool(orders)
        return
    for order, anew in orders:
        model_management.throw_exception_if_processing_interrupted()
        if when_missing is None:
            _submit(order, handle, anew)
        elif when_missing != BUILD_NOW:
            _build_in_background(order, handle)
        elif not _build_now(order, handle):
            break


def _orders(handle: EngineHandle, again: bool = True, pressed: bool = True) -> list[tuple[BuildOrder, bool]]:
    """Return the orders for what a node lacks, each with True where an engine that is there is built again.

    Engines that could not be opened are built again; all of them are where the node lacks nothing, and ``again``.
    """
    found, lacks, refused = handle.found, lacks_engine(handle), handle.found.refused
    if found.builder is None or not (lacks or pressed and (again or refused)):
        return []
    builder, rebuild = found.builder, refused or (() if lacks else found.engines)
    own = [engine for engine in rebuild if engine.manifest.identity.backend == builder.name]
    parts = to_build(handle, own) or [BuildSizes(handle.choice.profile, again=not lacks)]
    network, precision = handle.network, handle.choice.precision_for(handle.network)
    order = BuildOrder(network, precision, handle.choice.profile, builder, replaceable=handle.choice.replaceable,
                       loras=handle.choice.loras)  # fmt: skip
    return [(replace(order, profile=part.profile), part.again) for part in parts]


def generation(when_missing: str) -> str:
    """Return a text that changes when nodes that build have to run again.

    It changes when a build in the background has ended, a build with a waiting prompt was cancelled or left to another
    machine, a known engine is gone or damaged, a prompt for warming left a build out, the prompt has other pictures,
    calls ran uncompiled, or it orders builds. It looks at a few files' sizes and reads nothing.

    Do not make this depend on the node: ComfyUI caches outputs by inputs.
    """
    global _losses
    if when_missing == USE_NATIVE:
        return running_orders()
    for folder in [folder for folder, engine in list(_found.items()) if _is_lost(engine)]:
        _found.pop(folder, None)
        _losses += 1
    happened = _losses + _left_out + (to_do() if when_missing == BUILD_NOW else ended())
    return f"{happened} {ever_uncovered()} {running_pictures()} {running_orders()}"


def remember(handle: EngineHandle) -> None:
    """Note the engines that a node has found."""
    if handle.session is not None:
        _found.update((engine.folder, engine) for engine in handle.session.engines)


def _is_lost(engine: Engine) -> bool:
    try:
        engine.check_sizes()
    except Unavailable:
        return True
    return not (engine.folder / MANIFEST_NAME).is_file()


def _build_now(order: BuildOrder, handle: EngineHandle) -> bool:
    """Wait for a build; return True if there is an engine now."""
    job = _submit(order, handle, waits=True)
    bar = comfy_utils.ProgressBar(100, node_id=handle.node_id)
    shown = 0
    try:
        with gpu_room.waiting_prompt() as give_room:
            while not job.wait(0.1):
                model_management.throw_exception_if_processing_interrupted()
                give_room()
                if (percent := round(100 * job.fraction)) != shown:
                    shown = percent
                    bar.update_absolute(percent)
    finally:  # also when the user interrupts the prompt: other prompts may want the job
        builds.leave(job)
    if job.state is State.DONE:
        handle.refresh()
    else:
        _note_failure(job, handle)
    return job.state is State.DONE


def _build_in_background(order: BuildOrder, handle: EngineHandle) -> None:
    last = builds.latest(order, handle.library)
    if last is not None and last.state is State.FAILED and not last.elsewhere:
        _note_failure(last, handle)  # it would fail again at every prompt; 'build now' tries anew
    elif last is not None and last.state is State.CANCELLED and not last.attended:
        handle.note = "Its build was cancelled; 'build first' starts it again."
    else:
        job = _submit(order, handle)
        handle.note = f"An engine is being built in the background ({job.phase}) and used from the next prompt on."


def _submit(order: BuildOrder, handle: EngineHandle, again: bool = False, waits: bool = False) -> Job:
    job = builds.submit(order, handle.library, again, waits)
    node_states.ordered(handle.node_key, job)
    return job


def _note_failure(job: Job, handle: EngineHandle) -> None:
    """Say on the node why a build gave no engine; an engine that serves goes on serving."""
    message = "the build was cancelled." if job.state is State.CANCELLED else job.message
    if handle.session is None:
        handle.fallback = job.fallback or Fallback(Reason.BUILD_FAILED, message.rstrip("."))
    else:
        handle.note = message if job.elsewhere else f"A larger one was not built: {message}"
