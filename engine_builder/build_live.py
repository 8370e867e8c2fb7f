"""A build by the torch backend: the live network compiled for some sizes, checked against itself run plainly."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch

from ..architectures.tensors import Profile, TensorSpec
from ..backends import BuildError, Progress
from ..backends.torch_inductor import TorchBackend, file_name
from ..engine_library import Engine, EngineIdentity, Library, Manifest, Unavailable
from ..engine_library.library import describe_files
from ..live_torch import local_key
from ..live_torch.compiled import best_attention, compile_to_file
from ..live_torch.network import LiveNetwork
from .onnx_export import sample_inputs
from .parity import relative_error

if TYPE_CHECKING:
    from .build import BuildOrder

log = logging.getLogger(__name__)

LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative error of any output against the same network run plainly in the same precision."""


def sizes_to_compile(profile: Profile) -> list[dict[str, int]]:
    """The profile's ``opt`` sizes, with the batch that the guidance doubles and with the plain one."""
    opt = profile.sizes("opt")
    batches = [opt["B"]] + ([opt["B"] // 2] if opt["B"] % 2 == 0 else [])
    return [{**opt, "B": batch, **({"HB": 1} if "HB" in opt else {})} for batch in batches]


def build_live(order: BuildOrder, live: LiveNetwork, library: Library, progress: Progress, version: str) -> Engine:
    """Compile a live network and publish the files.

    Args:
        live: the network as the session runs it: its weights are on the device already, or come there now.

    Raises:
        BuildError: Inductor failed, or what it made differs from the network run plainly.
    """
    network, backend = order.network, order.backend
    assert isinstance(backend, TorchBackend)
    if (refusal := backend.cannot_build(network.device)) is not None:
        raise Unavailable(refusal.reason, refusal.detail)
    profile = order.profile.only({d.symbol for spec in live.inputs for d in spec.dims if not isinstance(d, int)})
    identity = EngineIdentity(
        architecture=network.architecture().name,
        weights=backend.layout(network),
        precision=order.precision,
        profile=profile,
        backend=backend.name,
        backend_version=backend.version(),
        device=backend.target(network.device),
    )
    progress("putting the weights in place", 0.0)
    live.follow(network.patcher)
    folder = library.building_folder()
    cases, seconds = sizes_to_compile(profile), {}
    record = []
    try:
        for i, symbols in enumerate(cases):
            progress(f"compiling for batch {symbols['B']}", 0.05 + 0.9 * i / len(cases))
            started = time.perf_counter()
            inputs = _inputs(live, symbols)
            try:
                compiled = compile_to_file(
                    live.function, live.flat_weights(), live.names, inputs, folder / file_name(symbols)
                )
            except Exception as error:
                log.exception("Hybrid TRT: Inductor failed on %s", network.label)
                raise BuildError(f"Inductor could not compile it ({type(error).__name__}: {error})") from error
            seconds[f"compile_{file_name(symbols)}"] = round(time.perf_counter() - started, 3)
            record.append(_checked(live, compiled, inputs, symbols, order.precision))
        files = [file_name(symbols) for symbols in cases]
        hashes = {name: file.sha256 for name, file in describe_files(folder, files).items()}
        files.append(local_key.sign(folder, identity.key, hashes))
        worst = max(case["rel_err"] for case in record)
        manifest = Manifest(
            identity=identity,
            kind=network.kind,
            label=network.label,
            inputs=tuple(live.inputs),
            outputs=tuple(live.outputs),
            files=describe_files(folder, files),
            parity={"rel_err": worst, "limit": LIMITS[order.precision], "cases": record,
                    "against": "the same weights run plainly on the same device"},
            seconds=seconds,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            pack_version=version,
        )
        engine = library.publish(folder, manifest)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    progress("ready", 1.0)
    log.info("Hybrid TRT: compiled %s in %.1f s, error to eager %.1e", network.label, sum(seconds.values()), worst)
    return engine


def _inputs(live: LiveNetwork, symbols: dict[str, int]) -> list[torch.Tensor]:
    specs: Sequence[TensorSpec] = live.inputs
    return [live.laid_out(t.to(live.device)) for t in sample_inputs(specs, symbols, seed=1).values()]


def _checked(live: LiveNetwork, compiled, inputs: list[torch.Tensor], symbols: dict[str, int], precision: str) -> dict:
    with torch.inference_mode(), best_attention(live.device):
        results = compiled(*live.flat_weights(), *inputs)
        expected = live.function(*inputs)
    errors = {s.name: relative_error(r, e) for s, r, e in zip(live.outputs, results, expected, strict=True)}
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= LIMITS[precision]:
        raise BuildError(
            f"what Inductor compiled differs from native by {errors[worst]:.2e} in {worst} at {symbols} "
            f"(limit {LIMITS[precision]:.0e} for {precision}), so no engine was made"
        )
    return {"symbols": symbols, "worst_output": worst, "rel_err": errors[worst]}
