"""Sizes as users give them, on a node or on the command line, as a profile."""

from __future__ import annotations

import math

from ..architectures.tensors import Profile, Range, Sizes

PIXELS = 8
"""Pixels per latent element."""
LEAST = 16
"""The smallest width or height in pixels that anybody may ask for."""

PRECISIONS = ("float16", "bfloat16", "float32")

NAMES = ("min_size", "opt_size", "max_size", "max_images", "max_tokens")
ANY = Sizes("", 64, 512, 1024)
"""For networks of no known family, which get no engine anyway."""


def profile_of(
    min_size: int = 0,
    opt_size: int = 0,
    max_size: int = 0,
    max_images: int = 0,
    max_tokens: int = 0,
    defaults: Sizes = ANY,
) -> Profile:
    """Sizes in pixels, images and tokens as a profile in latent elements; 0 is what fits the model.

    ComfyUI runs the positive and the negative prompt together, so the batch is up to twice the images.

    Args:
        defaults: the family's sizes. Where they contradict a number that was given, the number wins.

    Raises:
        ValueError: sizes that are too small or in the wrong order; the text is for the user.
    """
    given = [size for size in (min_size, opt_size, max_size) if size]
    if given != sorted(given) or any(size < LEAST for size in given):
        raise ValueError(
            f"min_size ({min_size}), opt_size ({opt_size}) and max_size ({max_size}) must rise in this order, from "
            f"{LEAST} on; 0 is what fits the model. Nothing was built; correct the sizes."
        )
    low = min_size or min(defaults.min_size, *given, defaults.max_size)
    high = max_size or max(defaults.max_size, *given, low)
    best = opt_size or min(max(defaults.opt_size, low), high)
    images = max_images or defaults.max_images
    size = Range(max(1, low // PIXELS), max(1, best // PIXELS), math.ceil(high / PIXELS))
    tokens = Range(77, 77, max(77, max_tokens or defaults.max_tokens))
    return Profile({"B": Range(1, 2, 2 * images), "H": size, "W": size, "T": tokens, "HB": Range(1, 1, 2 * images)})
