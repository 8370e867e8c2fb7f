"""One build from a loaded native network to an engine in the library.

The server's process only reads the weights that the engine is to hold, and publishes the result. Export, check and the
backend's build each run in a child: torch's exporter holds the GIL for up to twenty seconds at a time, all of them need
gigabytes, and only a process can be stopped at any moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from ..architectures.calls import serves_every_size
from ..architectures.shapes import Examples, symbols_in
from ..backends import Progress, cannot_open
from ..backends.lookup import cannot_serve
from ..comfy_model.hash_cache import source_of
from ..comfy_model.network import NativeNetwork
from ..comfy_model.structure_hash import structure_hash
from ..engine_library import (
    BuildError,
    Engine,
    EngineIdentity,
    Fallback,
    Library,
    Manifest,
    Reason,
    Unavailable,
    ValidationFailed,
    measurements,
    schema,
    trust,
)
from ..engine_library.disk import check_room, read_settings, readable
from ..engine_library.engine import GRAPH_NAME, LIMITS, PARAMETERS_NAME, describe_files
from ..engine_library.gpu import gpu_of
from ..engine_library.manifest import PACK_VERSION
from .check import check_engine, check_task, unchecked_engine
from .order import BuildOrder
from .resources import WAITED, MakeRoom, TimeLimit, check_memory, hold, on_cpu, with_room, within_memory
from .worker import helpers
from .worker.steps import STEPS
from .worker.task import Task
from .worker_process import STARTING, Log, run_in_worker
from .worker_tasks import (
    Runner,
    WeightsChanged,
    backend_task,
    network_task,
    only_gpu,
    stack_of,
    tensors_task,
    weights_task,
)

log = logging.getLogger(__name__)

ROOM = 2.2
"""Disk that a build needs at its height, in sizes of its weights: the graph's, the engine's, and some."""
LIVE_ROOM = 256e6
"""Disk that a build for live weights needs: it writes no weights."""
READS = 3
"""Times that the weights are read anew when somebody changes them meanwhile."""


def run_here(task: Task, progress: Progress, log: Log, environment: Mapping[str, str]) -> dict:
    """Do a task in this process, for tests and profilers: it cannot be stopped, and a crash ends the process."""
    return STEPS[task["step"]](task, progress)


def run_step(task: Task, progress: Progress, log: Log, environment: Mapping[str, str]) -> dict:
    """Do a task in a process of its own, with the helpers that there is room for now where it compiles."""
    if task["step"] == "compile":
        gpu = task["gpu"] if task["device"] == "cuda" else None
        task = {**task, "helpers": helpers.room_for_helpers(torch.device(task["device"], gpu))}
    return run_in_worker(task, progress, log, environment)


def build_engine(
    order: BuildOrder,
    library: Library,
    progress: Progress,
    log_line: Log = lambda line: None,
    run: Runner = run_step,
    again: bool = False,
    make_room: MakeRoom | None = None,
    patient: bool = True,
) -> Engine:
    """Export, check, compile and publish one engine. Blocks until it is done.

    The library is changed only by the last step; whatever stops the build before leaves nothing behind. An
    engine that is there already, or that another process has just built, is returned. An engine that was built here and
    has not run on this GPU yet is only compared with native, and serves from then on.

    Args:
        progress: called several times a second; may raise to cancel, which takes effect at once.
        log_line: takes what exporter and backend write.
        again: build although the engine is there.
        make_room: called before a step that needs the GPU.
        patient: wait for an engine that another machine builds, rather than return at once.

    Raises:
        Unavailable: no engine can be built for this network, or none by this backend on this machine; or another
            machine builds the engine.
        BuildError: an engine differs from native, or the backend could not build; the text is for the user.
        LibraryError: the library cannot take the engine; the text is for the user.
    """
    refusal = order.backend.cannot_build(order.target_device)
    if refusal is not None and order.backend.cannot_run(order.target_device) is not None:
        raise Unavailable(refusal.reason, refusal.detail)
    run = TimeLimit(read_settings(library.roots[0]).build_minutes, order.backend.name).kept_by(within_memory(run))
    if make_room is not None:
        run = with_room(run, order, make_room)
    for _ in range(READS):
        identity = _identity(order, progress)
        if not again and (found := _existing(order, library, identity)) is not None:
            return found
        try:
            with _explained(library), hold(library.lock(identity), order.target_device, progress, patient) as ours:
                if not again and (found := _existing(order, library, identity)) is not None:
                    return found
                if not again and (engine := unchecked_engine(order, library, identity)) is not None:
                    return check_engine(order, library, engine, ours, log_line, run)
                if refusal is not None:
                    raise Unavailable(refusal.reason, refusal.detail)
                return _Build(order, library, identity, ours, log_line, run).run()
        except WeightsChanged:
            order.network.forget_hash()
    raise BuildError(
        f"the weights of {order.network.label} changed again and again while they were read, so no engine was made "
        "and the normal model keeps running; build while nothing samples"
    )


def _identity(order: BuildOrder, progress: Progress) -> EngineIdentity:
    """Return the identity of an order's engine.

    Raises:
        Unavailable: the network can have no engine of this backend.
    """
    network, precision = order.network, order.precision
    if (never := cannot_serve(network, order.backend)) is not None:
        raise Unavailable.of(never)
    architecture = network.unchanged_architecture()
    if order.backend.runs_live_weights and not serves_every_size(architecture):
        raise Unavailable(Reason.UNSUPPORTED_MODEL, f"{order.backend.name} compiles no networks of its family")
    progress("reading weights", 0.0)
    specs = [*architecture.engine_inputs(network.module, precision), *architecture.outputs(network.module, precision)]
    weights = "" if order.any_weights else order.backend.weights(network, lambda: progress("reading weights", 0.0))
    layout = network.live_layout if order.backend.runs_live_weights else structure_hash(network.module)
    return EngineIdentity(
        architecture=architecture.name,
        weights=weights or layout,
        precision=precision,
        profile=order.engine_profile.only(symbols_in(specs)),
        backend=order.backend.name,
        backend_version=order.backend.version(),
        device=order.backend.target(order.target_device),
        layout="" if weights in ("", layout) else layout,
    )


def _existing(order: BuildOrder, library: Library, identity: EngineIdentity) -> Engine | None:
    """Return the engine, if it is there and whole; perhaps this machine cannot run it."""

    def usable(manifest: Manifest) -> Fallback | None:
        if order.backend.cannot_run(order.target_device) is not None:
            return None
        return cannot_open(order.backend, manifest, order.target_device)

    return library.exact(identity, usable, gpu_of(order.target_device))


def _check_precision(order: BuildOrder) -> None:
    """Raise BuildError, before anything is read or exported, where the backend cannot compute in this precision."""
    if order.precision not in order.backend.precisions:
        raise BuildError(
            f"{order.backend.name} {order.backend.version()} has no {order.precision}, so no engine was made and "
            f"the normal model keeps running; choose {' or '.join(order.backend.precisions)} as the engine node's "
            "precision"
        )


@contextmanager
def _explained(library: Library) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise readable(error, library.roots[0]) from error


@dataclass
class _Build:
    """The steps of one build, after all checks whether it is needed."""

    order: BuildOrder
    library: Library
    identity: EngineIdentity
    progress: Progress
    log_line: Log
    start: Runner

    def run(self) -> Engine:
        _check_precision(self.order)
        self._started, self._waited = time.perf_counter(), 0.0
        network, precision = self.order.network, self.order.precision
        live = self.order.backend.runs_live_weights
        size = self._bytes = sum(p.numel() for p in network.module.parameters()) * getattr(torch, precision).itemsize
        room = int(LIVE_ROOM if live else size * ROOM)
        check_room(self.library.roots[0], room, f"Building the engine of {network.label}")
        if not live:  # engines for live weights hold no weights
            target = self.library.roots[0] / self.identity.folder_name
            self.library.check_limit(size, f"The engine of {network.label}", replaced=target)
        check_memory(self.order.backend, 0 if live else size, network.label)
        with self.library.building_folder() as folder:
            manifest, record = self._make(folder)
            engine = self.library.publish(folder, manifest, lambda: self.progress("saving", 0.99), record)
        log.info(
            "Hybrid TRT: built %s for %s in %.1f s, %s",
            engine.folder.name,
            network.label,
            sum(manifest.seconds.values()),
            measurements.error_words(record.parity or manifest.parity),
        )
        return engine

    def _make(self, folder: Path) -> tuple[Manifest, trust.Record]:
        network, identity, live = self.order.network, self.identity, self.order.backend.runs_live_weights
        architecture = network.architecture()
        inputs = architecture.engine_inputs(network.module, identity.precision)
        outputs = architecture.outputs(network.module, identity.precision)
        common = {"folder": str(folder), **tensors_task(identity.precision, inputs, outputs)}
        native = network_task(network, identity.architecture, identity.precision, live)
        seconds, read = {}, ""
        if not live:
            started = time.perf_counter()
            weights, read = weights_task(network, identity, folder, self._part("reading weights", 0.0, 0.1))
            native |= weights
            seconds["read"] = time.perf_counter() - started
        made = self._compiled(common | native) if live else self._exported_and_built(common, native)
        seconds |= made["seconds"]
        manifest = Manifest(
            identity=identity,
            kind=architecture.role.value,
            label=schema.printable(network.label)[:1000],
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            files=describe_files(folder, made["files"], lambda: self.progress("saving", 0.9)),
            parity=made["parity"],
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            pack_version=PACK_VERSION,
            fingerprint=identity.weights if identity.any_weights else network.fingerprint(),
            source=_source(network),
            parameters=sum(p.numel() for p in network.module.parameters()),
            built_with=read if identity.any_weights else "",
            changes=schema.printable(self.order.changes)[:1000],
        )
        record, took = self._proven(manifest, folder, native)
        for leftover in folder.iterdir():
            if leftover.name not in manifest.files:
                leftover.unlink()
        seconds |= took
        # waits do not count for the forecast of the next build
        seconds["other"] = time.perf_counter() - self._started - self._waited - sum(seconds.values())
        return replace(manifest, seconds={name: round(value, 3) for name, value in seconds.items()}), record

    def _proven(self, manifest: Manifest, folder: Path, native: Task) -> tuple[trust.Record, dict[str, float]]:
        """Return the record of the engine: on a GPU it has to match native before it is kept."""
        order = self.order
        backend, device = order.backend, order.target_device
        gpu = gpu_of(device)
        if backend.runs_live_weights:  # compiled and compared on the device already
            return trust.Record(trust.BUILT, gpu=gpu), {}
        if not gpu or backend.cannot_run(device) is not None:
            return trust.BUILT_HERE, {}
        words = {
            "origin": f"the engine that {backend.name} made of {order.network.label}",
            "advice": "build again with precision float32 or another backend, and report this model",
        }
        task = check_task(order, manifest, folder, {"folder": str(folder), **native, **words})
        try:
            done = self._do(task, 0.9, 0.97, only_gpu(device))
        except ValidationFailed:
            raise
        except (BuildError, Unavailable) as failure:
            if isinstance(failure, Unavailable) and failure.fallback.reason is not Reason.UNCHECKED:
                raise
            # this error says nothing about the engine, which took minutes
            log.warning("Hybrid TRT: %s; it is kept, and used once it was checked", failure)
            return trust.BUILT_HERE, {}
        return trust.Record(trust.BUILT, parity=done["parity"], gpu=gpu), {"proof": sum(done["seconds"].values())}

    def _exported_and_built(self, common: Task, native: Task) -> dict:
        """Export to ONNX and build; return ``files``, ``parity`` and ``seconds``."""
        profile, examples = self.identity.profile, self._examples()
        no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
        export = {
            **common,
            **native,
            "step": "export",
            "limit": LIMITS[self.identity.precision],
            "traced": examples.traced,
            "compared": on_cpu(self.order.network.architecture(), examples.compared, examples.traced),
        }
        build = {
            **common,
            "step": "build",
            "target": self.identity.device,
            "any_weights": self.identity.any_weights,
            "options": self.order.backend.options(read_settings(self.library.roots[0])),
            "profile": profile.to_json(),
            **backend_task(self.order.backend),
        }
        if self.order.backend.writes(GRAPH_NAME):  # the graph is the engine: a second process would only start
            exported = self._do({**export, "then": build}, 0.1, 0.9, no_gpu)
            built = exported["built"]
        else:
            exported = self._do(export, 0.1, 0.5, no_gpu)
            on_gpu = only_gpu(self.order.target_device) | stack_of(self.order.backend)
            built = self._do({**build, "onnx": exported["onnx"]}, 0.5, 0.9, on_gpu)
        return {
            "files": [*built["files"], PARAMETERS_NAME],
            "parity": exported["parity"],
            "seconds": exported["seconds"] | built["seconds"],
        }

    def _compiled(self, task: Task) -> dict:
        """Compile for live weights; return ``files``, ``parity`` and ``seconds``."""
        device = self.order.target_device
        task = {**task, "step": "compile", "device": device.type, "gpu": device.index or 0,
                "known": self._known(Path(task["folder"])),
                "calls_attention": self.order.network.calls_attention}  # fmt: skip
        return self._do({**task, **backend_task(self.order.backend)}, 0.1, 0.9, only_gpu(device))

    def _known(self, folder: Path) -> list[str]:
        """Copy other engines' files into the folder, for parts of theirs that fit; return the copies' names."""
        names = []
        for contents in self.order.backend.known(self.library.engines(), self.order.target_device):
            names.append(f"known-{len(names)}")
            (folder / names[-1]).write_bytes(contents)
        return names

    def _examples(self) -> Examples:
        return self.order.network.architecture().examples(self.identity.profile)

    def _do(self, task: Task, begin: float, end: float, environment: Mapping[str, str]) -> dict:
        name = self.order.backend.name

        def progress(phase: str, fraction: float) -> None:
            if task["step"] == "build":
                phase = f"building with {name}" if phase == STARTING else f"{name}: {phase}"
            self.progress(phase, begin + (end - begin) * fraction)

        result = self.start(task, progress, self.log_line, environment)
        self._waited += result.pop(WAITED, 0.0)
        return result

    def _part(self, phase: str, begin: float, end: float) -> Callable[[float], None]:
        return lambda fraction: self.progress(phase, begin + (end - begin) * fraction)


def _source(network: NativeNetwork) -> dict:
    """Return the file that a network came from; empty if no JSON can hold its name."""
    source = source_of(network.patcher) or {}
    return source if schema.printable(source.get("path", "")) == source.get("path", "") else {}
