"""Fit of an engine node's numbers and the graph's pictures: Auto's numbers, and pictures that no engine serves.

The page shows these numbers and calculates none. The rules are the same as for calls: see ``Architecture``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ..architectures import ANY, Architecture, architectures
from ..architectures.calls import Call
from ..architectures.shapes import LEAST, MOST, TOKEN_STEP, Picture, Profile, RequestedSizes, Sizes, outside
from ..backends import backends
from ..engine_library import Engine
from .outlook import NodeRequest

STEP = 64
"""Auto's best size is a multiple of this many pixels."""


def size_report(
    request: NodeRequest, family: str, engines: Sequence[Engine], choice: str, any_size: bool, tokens: int
) -> dict:
    """For the page: ``sizes`` of the node, and the first picture without an engine for it.

    ``misfit`` lies outside the engine's profile, or outside the settings where there is no engine. ``widened`` are the
    numbers that would hold it, None where no node may have them. ``uncompiled`` lacks an engine of its size.

    Args:
        family: name of the architecture, ``""`` while it is not known.
        engines: the engines that the node uses.
        choice: the backend that they were looked up with.
        any_size: whether live weights serve every size.
        tokens: length of the last run's longest prompt.
    """
    known = architectures().get(family)
    fits, asked = known.sizes if known else None, _asked(request.sizes, known)
    misfit = uncompiled = None
    if engines:
        misfit, uncompiled = _not_served(engines, choice, any_size, request.pictures)
    elif asked and not any_size and not _runs_live(request.backend):
        misfit = _outside(known or ANY, _profile(known or ANY, asked), request.pictures)
    tokens = max(tokens, request.sizes.max_tokens if request.sizes else 0)
    return {
        "misfit": _json(misfit),
        "uncompiled": _json(uncompiled),
        "widened": widened(misfit, asked) if misfit and asked else None,
        "sizes": {
            "fits": asdict(fits) if fits else None,
            "asked": asdict(asked) if asked else None,
            "auto": auto(request.of_all_uses, fits, tokens) if request.of_all_uses else None,
            "pictures": [_json(picture) for picture in request.of_all_uses],
            "samplers": request.samplers,
        },
    }


def auto(pictures: Sequence[Picture], fits: Sizes | None, tokens: int) -> dict[str, int]:
    """Return the numbers of Auto: best at the first picture, and as wide as usual or as the pictures need.

    0 stands for the model's default, so a graph with default sizes leaves a node as it was saved.

    Args:
        pictures: pictures of the samplers, at least one.
        fits: the sizes of the model's family; until that is known 0 stands for them.
        tokens: length of the longest known prompt.
    """
    sides = [side for picture in pictures for side in (picture.width, picture.height)]
    first, least, most = pictures[0], min(sides), max(sides)
    images = max(picture.images for picture in pictures)
    middle = STEP * math.floor(math.sqrt(first.width * first.height) / STEP + 0.5)
    best = min(max(middle, min(first.width, first.height)), max(first.width, first.height))
    usual, bests = fits or Sizes("", least, best, most), [fits.opt_size] if fits else _bests()
    wanted = {
        "min_size": least if least < usual.min_size else 0,
        "opt_size": best if best not in bests else 0,
        "max_size": most if most > usual.max_size else 0,
        "max_images": images if images > usual.max_images else 0,
        "max_tokens": TOKEN_STEP * math.ceil(tokens / TOKEN_STEP) if tokens > usual.max_tokens else 0,
    }
    lowest = {name: LEAST if name.endswith("_size") else 0 for name in wanted}
    return {name: size and min(max(size, lowest[name]), MOST[name]) for name, size in wanted.items()}


def _bests() -> set[int]:
    """Return the best sizes of all families, for a model of unknown family."""
    return {known.sizes.opt_size for known in architectures().values()}


def widened(picture: Picture, asked: RequestedSizes) -> dict[str, int] | None:
    """Return the size settings to raise so that the picture fits."""
    least, most = sorted((picture.width, picture.height))
    if least < LEAST or most > MOST["max_size"] or picture.images > MOST["max_images"]:
        return None
    larger = {"max_size": most, "max_images": picture.images}
    wider = {name: size for name, size in larger.items() if size > getattr(asked, name)}
    return wider | ({"min_size": least} if least < asked.min_size else {})


def _asked(sizes: RequestedSizes | None, known: Architecture | None) -> RequestedSizes | None:
    """Return a node's numbers with the model's defaults in place of zeros; None where these are not known."""
    if sizes is None or (known is None and not all((sizes.min_size, sizes.opt_size, sizes.max_size, sizes.max_images))):
        return None
    return sizes.filled((known or ANY).sizes)


def _profile(known: Architecture, asked: RequestedSizes) -> Profile | None:
    try:
        return known.profile(asked)
    except ValueError:  # the page reports sizes in the wrong order
        return None


def _not_served(
    engines: Sequence[Engine], choice: str, any_size: bool, pictures: Sequence[Picture]
) -> tuple[Picture | None, Picture | None]:
    """Return the first picture outside an engine's range, and the first without an engine of its single size."""
    identity = engines[0].manifest.identity
    backend, known, profile = backends()[identity.backend], architectures()[identity.architecture], identity.profile
    calls = [call for engine in engines for call in backend.sizes(engine)]
    if not calls:
        return None if any_size or backend.runs_live_weights else _outside(known, profile, pictures), None
    if not backend.runs_live_weights and choice != backend.name:
        return None, None  # behind an engine of auto, live weights serve other sizes
    lacking = (one for one in pictures if not _sample_alike(known, known.calls(profile, one), calls))
    return None, next(lacking, None)


def _sample_alike(known: Architecture, calls: Iterable[Call], others: Iterable[Call]) -> bool:
    """Tell whether a call has the same sizes of a picture as another. The prompt's length does not count."""
    of_picture = [name for name, symbol in known.symbols.items() if symbol.of_picture]
    return any(all(call.get(name) == sizes[name] for name in of_picture if name in sizes)
               for sizes in others for call in calls)  # fmt: skip


def _outside(known: Architecture, profile: Profile | None, pictures: Sequence[Picture]) -> Picture | None:
    """Return the first picture without any call inside a profile."""
    for picture in pictures if profile else ():
        if all(outside(profile, call, known.symbols) for call in known.calls(profile, picture)):
            return picture
    return None


def _runs_live(backend: str) -> bool:
    found = backends().get(backend)
    return found is not None and found.runs_live_weights


def _json(picture: Picture | None) -> dict[str, int] | None:
    return picture and {"width": picture.width, "height": picture.height, "images": picture.images}
