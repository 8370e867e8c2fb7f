"""Base of backends whose engines take one size each. A session uses all engines of a network, one for each size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....architectures.calls import RequestedCalls
from ....architectures.shapes import Profile, Range
from ....engine_library import Engine, Fallback
from ...file_backend import FileBackend

if TYPE_CHECKING:
    from ....comfy_model.network import NativeNetwork
    from ....sessions.session import Session

MOST_OPEN = 2
"""Engines that are open at once, and that are built for sizes which a run showed: each has all weights."""


class OneSizeBackend(FileBackend):
    """A backend whose engines take the size that the profile they were built for is best at, and no other."""

    def engine_profile(self, profile: Profile) -> Profile:
        return Profile({symbol: Range(size, size, size) for symbol, size in profile.sizes("opt").items()})

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        return [engine.manifest.identity.profile.sizes("opt")]

    def in_use(self, engines: Sequence[Engine]) -> list[Engine]:
        return [e for e in engines if e.manifest.identity.weights == engines[0].manifest.identity.weights]

    def profiles(self, network: NativeNetwork, calls: RequestedCalls) -> list[Profile]:
        """One for each picture, and for what most calls had."""
        architecture, usual = network.architecture(), calls.profile.sizes("opt")
        drawn = [Profile.around(architecture.calls(calls.profile, picture)) for picture in calls.pictures]
        seen = [Profile.around([usual | dict(call)]) for call in (calls.seen or ())[:MOST_OPEN]]
        found: list[Profile] = []
        for profile in map(self.engine_profile, [*(drawn or [calls.profile]), *seen]):
            if profile not in found:
                found.append(profile)
        return found

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> Session:
        from ....sessions.session import refusal_of
        from .session import one_size_session  # needs ComfyUI

        sound = [engine for engine in engines if refusal_of(engine) is None] or engines
        return one_size_session([self.session_of(engine, network) for engine in sound], MOST_OPEN)
