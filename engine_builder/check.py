"""An engine from elsewhere becomes one that serves here: its own child compares it with native, then it is signed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ..backends import Progress
from ..engine_library import BuildError, Engine, EngineIdentity, Library, Reason, Unavailable, Wanted, trust
from ..engine_library.disk import check_room
from ..engine_library.parity import LIMITS
from ..native_model.snapshot import write_structure, write_weights
from .child_process import Log
from .child_tasks import Runner, WeightsChanged, backend_task, network_task, only_gpu, tensors_task
from .in_child.onnx_export import DATA_NAME

if TYPE_CHECKING:
    from .order import BuildOrder

log = logging.getLogger(__name__)


def unchecked_engine(order: BuildOrder, library: Library, identity: EngineIdentity) -> Engine | None:
    """An engine that would serve an order if only it were checked, or None; where it cannot run it cannot be."""
    backend, device = order.backend, order.target_device
    if backend.runs_live_weights or backend.unavailable(device) is not None:
        return None
    wanted = Wanted(identity.architecture, [identity.weights], identity.precision, identity.profile, [backend.name])
    return library.unchecked(wanted, lambda manifest: backend.refuses(manifest, device))


def check_engine(
    order: BuildOrder, library: Library, engine: Engine, progress: Progress, log_line: Log, run: Runner
) -> Engine:
    """Compare an engine with an order's network and sign it; one that fails is signed as refused and never serves.

    Raises:
        BuildError: it computes something else, or cannot be run; the text has the figures.
        Unavailable: nothing was found out, for example for want of memory.
        LibraryError: the disk has no room for the comparison.
        WeightsChanged: the network is not that of the engine any more.
    """
    progress("checking the engine's files", 0.0)
    try:
        engine.check_sizes()
        engine.check_contents(lambda: progress("checking the engine's files", 0.0))
        record = _compared(order, library, engine, progress, log_line, run)
    except (BuildError, Unavailable) as failure:
        if isinstance(failure, BuildError) or failure.fallback.reason is Reason.BROKEN_ENGINE:
            why = failure.fallback.detail if isinstance(failure, Unavailable) else str(failure)
            trust.keep(engine.folder, engine.manifest, trust.Record(trust.REFUSED, why))
        raise
    trust.keep(engine.folder, engine.manifest, record)
    log.info("Hybrid TRT: checked %s, error to native %.1e", engine.folder.name, record.parity["rel_err"])
    return engine


def _compared(
    order: BuildOrder, library: Library, engine: Engine, progress: Progress, log_line: Log, run: Runner
) -> trust.Record:
    network, device, identity = order.network, order.target_device, engine.manifest.identity
    dtype = getattr(torch, identity.precision)
    examples = network.architecture().examples(identity.profile)
    structure = write_structure(network, dtype)
    size = sum(p.numel() for p in network.module.parameters()) * dtype.itemsize
    check_room(library.roots[0], int(size * 1.1), f"Checking the engine of {network.label}")
    folder = library.building_folder()
    try:
        weights_file = folder / DATA_NAME
        read, index = write_weights(network, dtype, weights_file, lambda f: progress("reading weights", 0.2 * f))
        if read != identity.weights:
            raise WeightsChanged
        done = run({
            "step": "check",
            "folder": str(folder),
            "engine": str(engine.folder),
            "manifest": engine.manifest.to_json(),
            "device": device.type,
            "limit": LIMITS[identity.precision],
            "extremes": examples.extremes_on_cpu if device.type == "cpu" else examples.extremes,
            **tensors_task(network, identity.precision),
            **network_task(network, structure, index, weights_file),
            **backend_task(order.backend),
        }, lambda phase, fraction: progress(phase, 0.2 + 0.8 * fraction), log_line, only_gpu(device))  # fmt: skip
    finally:
        library.discard(folder)
    return trust.Record(trust.CHECKED, parity=done["parity"])
