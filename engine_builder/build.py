"""One build from a loaded native network to an engine in the library."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from ..architectures.tensors import Profile
from ..backends import Backend, BuildRequest, Progress
from ..engine_library import Engine, EngineIdentity, Library, Manifest, Unavailable
from ..engine_library.library import describe_files
from ..engine_library.native import NativeNetwork
from .clean_copy import clean_copy
from .onnx_export import PARAMETERS_NAME, export_onnx
from .parity import check_parity

log = logging.getLogger(__name__)

PACK_VERSION = "0.1.0"

TRACED = {"B": 2, "H": 9, "W": 12, "T": 77, "HB": 2}
"""Sizes of the traced example, inside the profile or not: small, since half precision is slow on a CPU."""


@dataclass(frozen=True)
class BuildOrder:
    """What to build: which network, how precise, for which shapes, by whom."""

    network: NativeNetwork
    precision: str
    profile: Profile
    backend: Backend


def build_engine(order: BuildOrder, library: Library, progress: Progress) -> Engine:
    """Export, check, compile and publish one engine. Blocks until it is done.

    The library is changed only by the last step; whatever stops the build before leaves nothing behind.

    Raises:
        Unavailable: no engine can be built for this network, or none by this backend on this machine.
        BuildError: parity failed or the backend could not build; the text is for the user.
    """
    network, precision, backend = order.network, order.precision, order.backend
    if (refusal := backend.cannot_build(network.device)) is not None:
        raise Unavailable(refusal.reason, refusal.detail)
    architecture = network.architecture()
    inputs = tuple(architecture.inputs(network.module, precision))
    outputs = tuple(architecture.outputs(network.module, precision))
    profile = order.profile.only(_symbols(inputs))
    seconds: dict[str, float] = {}

    folder = library.building_folder()
    try:
        progress("reading weights", 0.0)
        weights = network.weights_hash()
        started = time.perf_counter()
        dtype = getattr(torch, precision)
        function = architecture.function(clean_copy(network, dtype))
        progress("exporting", 0.1)
        graph = export_onnx(function, inputs, outputs, TRACED, folder)
        seconds["export"] = time.perf_counter() - started

        progress("checking against native", 0.5)
        started = time.perf_counter()
        parity = check_parity(graph, function.float(), inputs, outputs, profile, precision)
        seconds["parity"] = time.perf_counter() - started
        del function

        progress(f"building with {backend.name}", 0.7)
        started = time.perf_counter()
        target = backend.target(network.device)
        request = BuildRequest(graph, inputs, outputs, profile, folder, target)
        files = backend.build(request, lambda phase, fraction: progress(phase, 0.7 + 0.2 * fraction))
        seconds["build"] = time.perf_counter() - started

        progress("saving", 0.9)
        manifest = Manifest(
            identity=EngineIdentity(
                architecture=architecture.name,
                weights=weights,
                precision=precision,
                profile=profile,
                backend=backend.name,
                backend_version=backend.version(),
                device=target,
            ),
            kind=architecture.kind,
            label=network.label,
            inputs=inputs,
            outputs=outputs,
            files=describe_files(folder, [*files, PARAMETERS_NAME]),
            parity=parity,
            seconds={name: round(value, 3) for name, value in seconds.items()},
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            pack_version=PACK_VERSION,
        )
        for leftover in folder.iterdir():
            if leftover.name not in manifest.files:
                leftover.unlink()
        engine = library.publish(folder, manifest)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    progress("ready", 1.0)
    log.info(
        "Hybrid TRT: built %s for %s in %.1f s, error to native %.1e",
        engine.folder.name,
        network.label,
        sum(seconds.values()),
        parity["rel_err"],
    )
    return engine


def _symbols(specs: Sequence) -> set[str]:
    return {dim.symbol for spec in specs for dim in spec.dims if not isinstance(dim, int)}
