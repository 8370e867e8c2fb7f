"""Profiles of latents as the nodes make them."""

from __future__ import annotations

from hybrid_trt.architectures.shapes import Profile, RequestedSizes, Sizes
from hybrid_trt.architectures.sizes import ANY, LatentSizes


def profile_of(*asked: int, defaults: Sizes = ANY.sizes, **named: int) -> Profile:
    """Sizes in the order of ``RequestedSizes`` as a profile."""
    return LatentSizes(defaults).profile(RequestedSizes(*asked, **named))
