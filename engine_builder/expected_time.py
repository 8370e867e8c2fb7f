"""How long a build will take, from how long builds like it took on this machine; nothing when there were none."""

from __future__ import annotations

from ..engine_library import Library
from .build import BuildOrder

MOST_ALIKE = 4.0
"""Networks that are this many times larger or smaller say nothing: with tiny ones the start of a process is all."""


def expected_seconds(order: BuildOrder, library: Library) -> float | None:
    """Wall seconds from the first read to the engine, scaled by the number of parameters.

    The latest build of the same kind of network by the same backend, in the same precision and for the same device,
    decides.
    """
    parameters = sum(p.numel() for p in order.network.module.parameters())
    alike = []
    for engine in library.engines():
        manifest = engine.manifest
        identity = manifest.identity
        same = (manifest.kind == order.network.kind and identity.backend == order.backend.name
                and identity.precision == order.precision
                and identity.device == order.backend.target(order.target_device))
        if same and manifest.parameters and 1 / MOST_ALIKE <= parameters / manifest.parameters <= MOST_ALIKE:
            alike.append((manifest.created, sum(manifest.seconds.values()) * parameters / manifest.parameters))
    return round(max(alike)[1], 1) if alike else None
