"""Expected time of a build: the time of similar builds on this machine, else our own measurements."""

from __future__ import annotations

from ..architectures import architectures
from ..architectures.sizes import LatentSizes
from ..backends import backends
from ..engine_library import Library, trust
from .order import BuildOrder

MOST_ALIKE = 4.0
"""Largest ratio of sizes between similar networks: for tiny ones, starting a process takes all the time."""
BLOCKS, LEAST = 23.0, 1e8
"""Seconds of a network in blocks, and its least parameters: Flux.1's from first_minutes_h200.json (16 CPU cores). A
block of each kind is compiled, so a larger network takes no longer."""
MANY_KINDS = {"unet": 82.4, "controlnet": 25.1}
"""Seconds of SD1.5's UNet, which has many kinds of blocks, and then of its ControlNet, from unet_blocks_h200.json."""

MEASURED: dict[tuple[str, str], tuple[tuple[float, float], ...]] = {
    ("unet", "tensorrt_rtx"): ((0.86e9, 202.5),),
    ("controlnet", "tensorrt_rtx"): ((0.36e9, 68.6),),
    ("unet", "tensorrt"): ((0.86e9, 520.2), (2.57e9, 1102.6)),
    ("controlnet", "tensorrt"): ((0.36e9, 274.1),),
    ("unet", "onnxruntime"): ((0.86e9, 142.3),),
    ("controlnet", "onnxruntime"): ((0.36e9, 28.6),),
}
"""Kind and backend -> parameters and wall seconds, from benchmarks/results: builds.json (2 CPU cores) and
tensorrt86_h200.json for TensorRT (8.6 only). The larger model's row is of level 1, while another build ran."""


def expected_seconds(order: BuildOrder, library: Library) -> float | None:
    """Wall seconds of an order from the first read to the engine; see ``expected``."""
    parameters = sum(p.numel() for p in order.network.module.parameters())
    target = order.backend.target(order.target_device)
    kind, family = order.network.role.value, order.network.architecture().name
    return expected(library, kind, family, order.backend.name, order.precision, target, parameters)


def expected(
    library: Library, kind: str, family: str, backend: str, precision: str, target: str, parameters: int
) -> float | None:
    """Wall seconds of a build, scaled by the number of parameters; None without measurements.

    The latest build of the same kind of network by the same backend, in the same precision and for the same device,
    decides; without one, the figures that we measured. Of a network in blocks the longest build of its family decides:
    the next ones find compiled blocks.
    """
    alike, in_blocks = [], _in_blocks(family, backend)
    for engine in library.engines():  # a copied engine's times are another machine's
        manifest = engine.manifest
        identity = manifest.identity
        same = (manifest.kind == kind and identity.backend == backend and identity.precision == precision
                and identity.device == target)
        if not same or not _alike(parameters, manifest.parameters) or not trust.built_here(engine):
            continue
        seconds = sum(manifest.seconds.values())
        if not in_blocks:
            alike.append((manifest.created, seconds * parameters / manifest.parameters))
        elif identity.architecture == family:
            alike.append(("", seconds))
    if alike:
        return round(max(alike)[1], 1)
    if in_blocks:
        many = isinstance(architectures()[family], LatentSizes)
        return (MANY_KINDS.get(kind, BLOCKS) if many else BLOCKS) if parameters >= LEAST else None
    near = [(size, took) for size, took in MEASURED.get((kind, backend), ()) if _alike(parameters, size)]
    if not near:
        return None
    size, took = min(near, key=lambda one: abs(one[0] - parameters))
    return round(took * parameters / size)


def _in_blocks(family: str, backend: str) -> bool:
    known, builder = architectures().get(family), backends().get(backend)
    return None not in (known, builder) and builder.runs_live_weights


def _alike(parameters: int, known: float) -> bool:
    return bool(known) and 1 / MOST_ALIKE <= parameters / known <= MOST_ALIKE
