"""Calls to compile for: those that a graph asks for and its last run made, less those that have files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .shapes import Profile
from .sizes import Picture

if TYPE_CHECKING:
    from . import Architecture

Call = Mapping[str, int]
"""The sizes of a call, symbol -> size."""


@dataclass(frozen=True)
class UncoveredCall:
    """A call that no engine of its size was there for.

    Attributes:
        sizes: those of the call, (symbol, size).
        words: the same for people.
        ran: how it ran instead: ``"graph"``, ``"eager"`` (both on live weights) or ``"native"``.
    """

    sizes: frozenset[tuple[str, int]]
    words: str
    ran: str


@dataclass(frozen=True)
class RequestedCalls:
    """The calls that a node wants engines for.

    Attributes:
        profile: its sizes.
        pictures: those that the graph asks for, as far as it tells.
        seen: calls of the last run that had no engine of their size, the most frequent first; None before a run.
    """

    profile: Profile
    pictures: Sequence[Picture] = ()
    seen: Sequence[Call] | None = None

    def hold(self, architecture: Architecture, call: Call) -> bool:
        """Tell whether the node's sizes or the graph's pictures ask for a call."""
        drawn = [own for picture in self.pictures for own in architecture.calls(self.profile, picture)]
        ranges = self.profile.ranges
        return all(
            ranges[symbol].contains(size) or any(size == own[symbol] for own in drawn)
            for symbol, size in call.items()
            if symbol in ranges
        )


def calls_to_compile(
    architecture: Architecture, requested: RequestedCalls, symbols: Collection[str], compiled: Collection[Call]
) -> list[list[Call]]:
    """List the calls that lack a compiled file; those that differ in nothing but their batch are one list.

    A picture's prompt is as long as a run showed it to be. So a picture that has some file lacks nothing until a run
    says so. Where neither the graph nor a run tells what is asked for, it is what the profile is best at.

    Args:
        symbols: those of the network's inputs.
        compiled: the calls that have a file.
    """
    profile, seen = requested.profile.only(symbols), requested.seen
    found = [call for call in seen or () if call not in compiled]
    for picture in requested.pictures:
        calls = architecture.calls(profile, picture)
        there = [architecture.picture_of(call) for call in (*compiled, *found)]
        if not any(architecture.picture_of(call) in there for call in calls):
            found += calls
    if not requested.pictures and seen is None:
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
