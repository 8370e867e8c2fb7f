"""Sizes as users give them, on a node or on the command line, as a profile."""

from __future__ import annotations

import math

from ..architectures.tensors import Profile, Range

PIXELS = 8
"""Pixels per latent element."""

PRECISIONS = ("float16", "bfloat16", "float32")

DEFAULTS = {"min_size": 64, "opt_size": 512, "max_size": 1024, "max_images": 4, "max_tokens": 616}


def profile_of(min_size: int, opt_size: int, max_size: int, max_images: int, max_tokens: int) -> Profile:
    """Sizes in pixels, images and tokens as a profile in latent elements.

    ComfyUI runs the positive and the negative prompt together, so the batch is up to twice the images.

    Raises:
        ValueError: sizes in the wrong order; the text is for the user.
    """
    if not min_size <= opt_size <= max_size:
        raise ValueError(
            f"min_size ({min_size}), opt_size ({opt_size}) and max_size ({max_size}) must rise in this order. "
            "Nothing was built; correct the sizes."
        )
    size = Range(max(1, min_size // PIXELS), max(1, opt_size // PIXELS), math.ceil(max_size / PIXELS))
    batch = Range(1, 2, 2 * max_images)
    tokens = Range(77, 77, max(77, max_tokens))
    return Profile({"B": batch, "H": size, "W": size, "T": tokens, "HB": Range(1, 1, 2 * max_images)})
