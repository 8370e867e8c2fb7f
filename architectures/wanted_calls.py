"""Which calls to compile for: those that a graph asks for and its last run made, less those that have files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from .shapes import Profile
from .sizes import Picture

if TYPE_CHECKING:
    from . import Architecture

Call = Mapping[str, int]
"""The sizes of a call, symbol -> size."""


def calls_to_compile(
    architecture: Architecture,
    profile: Profile,
    pictures: Sequence[Picture],
    seen: Sequence[Call] | None,
    compiled: Collection[Call],
) -> list[list[Call]]:
    """The calls that lack a compiled file; those that differ in nothing but their batch are one list.

    A picture's prompt is as long as a run showed it to be, so a picture that some file is for lacks nothing until a
    run says so. Where neither the graph nor a run tells what is asked for, it is what the profile is best at.

    Args:
        profile: what the node asks for, with the network's own symbols alone.
        pictures: those that the graph asks for, as far as it tells.
        seen: the calls of the last run that no file was for, or None when no run is known.
    """
    found = [call for call in seen or () if call not in compiled]
    for picture in pictures:
        calls = architecture.calls(profile, picture)
        there = [architecture.picture_of(call) for call in (*compiled, *found)]
        if not any(architecture.picture_of(call) in there for call in calls):
            found += calls
    if not pictures and seen is None:
        usual = [{s: call[s] for s in profile.ranges} for call in architecture.examples(profile).compiled]
        found = [call for call in usual if call not in compiled] if usual[0] not in compiled else []
    return _engines(found, architecture.batch)


def _engines(calls: Sequence[Call], batch: str) -> list[list[Call]]:
    together: dict[tuple, list[Call]] = {}
    for call in calls:
        own = together.setdefault(tuple(sorted((s, n) for s, n in call.items() if s != batch)), [])
        if call not in own:
            own.append(call)
    return list(together.values())
