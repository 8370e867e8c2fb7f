"""Profiles of latents as the nodes make them."""

from __future__ import annotations

from hybrid_trt.architectures.latent import ANY, LatentSizes
from hybrid_trt.architectures.sizes import Asked, Sizes
from hybrid_trt.architectures.tensors import Profile


def profile_of(*asked: int, defaults: Sizes = ANY.sizes, **named: int) -> Profile:
    """Sizes in the order of ``Asked`` as a profile."""
    return LatentSizes(defaults).profile(Asked(*asked, **named))
