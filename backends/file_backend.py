"""Base of backends whose engines are files with the weights in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ..architectures.calls import RequestedCalls
from ..architectures.shapes import PRECISIONS, Profile
from ..engine_library import Engine, Fallback
from . import BuildSizes

if TYPE_CHECKING:
    import torch

    from ..comfy_model.network import NativeNetwork
    from ..sessions.file_session import FileSession
    from ..sessions.session import Runner, Session

MOST_OPEN = 2
"""Engines of one size that are open at once, and that are built for sizes which a run showed: each has all weights."""


class FileBackend:
    """Base of such backends. They define ``load``; sessions are the same for all.

    Attributes:
        file_names: those of the files that builds make.
        keeps_weights: True if an engine that takes any weights has those it was built with when it is opened.
        one_size: True if an engine takes one size only, the best of the profile it was built for. A session then uses
            all engines of a network, one for each size.
    """

    file_names: Collection[str]
    build_stack = 0
    runs_live_weights = False
    refits = False
    keeps_weights = False
    one_size = False
    precisions: Collection[str] = PRECISIONS

    def build_memory(self, weights: int) -> int:
        return 0

    def writes(self, name: str) -> bool:
        return name in self.file_names

    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        return network.weights_hash(check)

    def engine_profile(self, profile: Profile) -> Profile:
        return profile.at_best() if self.one_size else profile

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        return [engine.manifest.identity.profile.sizes("opt")] if self.one_size else []

    def in_use(self, engines: Sequence[Engine]) -> list[Engine]:
        alike = [e for e in engines if e.manifest.identity.weights == engines[0].manifest.identity.weights]
        return alike if self.one_size else alike[:1]

    def to_build(
        self, network: NativeNetwork, calls: RequestedCalls, engines: Sequence[Engine], rebuild: Collection[Engine] = ()
    ) -> list[BuildSizes]:
        return [
            BuildSizes(profile, again=_hold(rebuild, profile))
            for profile in self._profiles(network, calls)
            if _hold(rebuild, profile) or not _hold(engines, profile)
        ]

    def _profiles(self, network: NativeNetwork, calls: RequestedCalls) -> list[Profile]:
        """The shapes to have engines for. Those of one size: one for each picture, and for what most calls had."""
        if not self.one_size:
            return [calls.profile]
        architecture, usual = network.architecture(), calls.profile.sizes("opt")
        drawn = [Profile.around(architecture.calls(calls.profile, picture)).at_best() for picture in calls.pictures]
        seen = [Profile.around([usual | dict(call)]) for call in (calls.seen or ())[:MOST_OPEN]]
        found: list[Profile] = []
        for profile in [*(drawn or [calls.profile.at_best()]), *seen]:
            if profile not in found:
                found.append(profile)
        return found

    def load(self, engine: Engine, device: torch.device) -> Runner:
        """Open an engine for running on a device.

        Raises:
            Unavailable: it cannot be opened here.
        """
        raise NotImplementedError

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> Session:
        from ..sessions.file_session import file_session  # needs ComfyUI
        from ..sessions.session import refusal_of
        from .tensorrt.one_size import one_size_session

        def opened(engine: Engine) -> FileSession:
            return file_session(
                engine, lambda engine, device: self.load(engine, device), network.device, network, self.keeps_weights
            )

        sound = [engine for engine in engines if refusal_of(engine) is None] or engines
        sessions = [opened(engine) for engine in sound]
        return one_size_session(sessions, MOST_OPEN) if self.one_size else sessions[0]


def _hold(engines: Collection[Engine], profile: Profile) -> bool:
    own = [engine.manifest.identity.profile for engine in engines]
    return any(its.contains(profile.only(its.ranges)) for its in own)  # a UNet's has no sizes of hints
