"""Check of an engine that this machine built without its GPU: compared with native there, it is signed and serves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..backends import Progress, cannot_open
from ..engine_library import (
    Engine,
    EngineIdentity,
    EngineQuery,
    Library,
    Manifest,
    Reason,
    Unavailable,
    ValidationFailed,
    measurements,
    trust,
)
from ..engine_library.disk import check_room
from ..engine_library.engine import LIMITS
from ..engine_library.gpu import gpu_of
from .resources import check_memory, on_cpu
from .worker.task import Task
from .worker_process import Log
from .worker_tasks import Runner, backend_task, network_task, only_gpu, tensors_task, weights_task

if TYPE_CHECKING:
    from .order import BuildOrder

log = logging.getLogger(__name__)


def unchecked_engine(order: BuildOrder, library: Library, identity: EngineIdentity) -> Engine | None:
    """Return an engine built here that would serve an order once it was checked on its device, or None."""
    backend, device = order.backend, order.target_device
    if backend.runs_live_weights or backend.cannot_run(device) is not None:
        return None
    wanted = EngineQuery(
        identity.architecture,
        [identity.weights],
        identity.precision,
        identity.profile,
        [backend.name],
        gpu_of(device),
        layout=identity.layout,
    )
    return library.unchecked(wanted, lambda manifest: cannot_open(backend, manifest, device))


def check_engine(
    order: BuildOrder, library: Library, engine: Engine, progress: Progress, log_line: Log, run: Runner
) -> Engine:
    """Compare an engine with an order's network and sign it; a failed engine is signed as refused and never serves.

    Raises:
        ValidationFailed: its results differ, or it cannot be run; the text has the figures.
        BuildError, Unavailable: the comparison could not be made, for example for want of memory.
        LibraryError: the disk has no room for the comparison.
        WeightsChanged: the network no longer matches the engine.
    """
    progress("checking the engine's files", 0.0)
    try:
        engine.check_sizes()
        engine.check_contents(lambda: progress("checking the engine's files", 0.0))
        record = _compared(order, library, engine, progress, log_line, run)
    except ValidationFailed as refuted:
        _refuse(engine, str(refuted))
        raise
    except Unavailable as failure:
        if failure.fallback.reason is Reason.BROKEN_ENGINE:
            _refuse(engine, failure.fallback.detail)
        raise
    trust.keep(engine.folder, engine.manifest, record)
    log.info("Hybrid TRT: checked %s, %s", engine.folder.name, measurements.error_words(record.parity))
    return engine


def _refuse(engine: Engine, why: str) -> None:
    trust.keep(engine.folder, engine.manifest, trust.Record(trust.REFUSED, why))


def _compared(
    order: BuildOrder, library: Library, engine: Engine, progress: Progress, log_line: Log, run: Runner
) -> trust.Record:
    network, device, identity = order.network, order.target_device, engine.manifest.identity
    native = network_task(network, identity.architecture, identity.precision)
    size = sum(p.numel() for p in network.module.parameters()) * getattr(torch, identity.precision).itemsize
    check_room(library.roots[0], int(size * 1.1), f"Checking the engine of {network.label}")
    check_memory(order.backend, size, network.label, checks=True)
    with library.building_folder() as folder:
        native |= weights_task(network, identity, folder, lambda f: progress("reading weights", 0.2 * f))[0]
        words = {
            "origin": f"{engine.folder.name}, which was built without this GPU,",
            "advice": "build again to have another in its place",
        }
        task = check_task(order, engine.manifest, engine.folder, {"folder": str(folder), **native, **words})
        done = run(task, lambda phase, fraction: progress(phase, 0.2 + 0.8 * fraction), log_line, only_gpu(device))
    return trust.Record(trust.BUILT, parity=done["parity"], gpu=gpu_of(device))


def check_task(order: BuildOrder, manifest: Manifest, engine: Path, native: Task) -> Task:
    """Return the task that compares an engine with native on the device that an order is for.

    Args:
        engine: the folder with its files.
        native: the work folder, the network, and words for a failure.
    """
    device, identity = order.target_device, manifest.identity
    module, architecture = order.network.module, order.network.architecture()
    inputs = architecture.engine_inputs(module, identity.precision)
    examples = architecture.examples(identity.profile)
    calls, timed = examples.extremes, None
    if device.type == "cpu":
        calls = on_cpu(architecture, calls, calls[0])
    else:
        timed = examples.timed
        calls = calls if timed in calls else [*calls, timed]
    return {
        "step": "check",
        "engine": str(engine),
        "manifest": manifest.to_json(),
        "device": device.type,
        "limit": LIMITS[identity.precision],
        "extremes": calls,
        "timed": timed,
        **tensors_task(identity.precision, inputs, architecture.outputs(module, identity.precision)),
        **native,
        **backend_task(order.backend),
    }
