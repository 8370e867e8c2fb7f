"""Engines of one network that are for one size each, as one session: each call goes to the engine for its size."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..architectures import profile_words
from ..architectures.shapes import Profile, Shape
from ..architectures.wanted_calls import Call
from ..engine_library import Engine, Fallback, Unavailable
from .file_session import FileSession
from .session import BROKEN, DelegateToActive, RequestedCalls, UncoveredCall, refusal_of, refuse, shared

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ..comfy_model.network import NativeNetwork

log = logging.getLogger(__name__)

MOST_OPEN = 2
"""Engines that are open at once: a workflow seldom has more than two sizes, and each engine has all weights."""
MAX_CHOICES = 64
"""Sets of shapes whose engine is remembered."""


class SeveralSizes(DelegateToActive):
    """Sessions of one backend's engines with the same weights; see ``Session``. The first is of the size that the node
    asks for; the others open when a call of their size comes, and the one that was used longest ago then closes.

    A call that no engine is for is the first one's, which says why it does not take it. One that cannot be opened
    leaves the others in service.
    """

    uncompiled: UncoveredCall | None = None
    refusal: str | None = None

    def __init__(self, sessions: Sequence[FileSession]):
        self._sessions = tuple(sessions)
        self._used = [*(session for session in sessions[1:] if session.loaded), sessions[0]]  # the latest last
        self._choices: dict[tuple[Shape, ...], FileSession] = {}
        self._broken: dict[FileSession, Fallback] = {}
        self._of: tuple[weakref.ref[NativeNetwork], weakref.ref[ModelPatcher]] | None = None
        self._following: FileSession | None = None

    def is_of(self, sessions: Sequence[FileSession]) -> bool:
        """Whether it is of these, in this order."""
        return self._sessions == tuple(sessions)

    @property
    def _last(self) -> FileSession:
        return self._used[-1]

    @property
    def engines(self) -> list[Engine]:
        return [session.engine for session in self._sessions]

    @property
    def parts(self) -> frozenset[FileSession]:
        return frozenset(self._sessions)

    @property
    def weights(self) -> str:
        return self._last.weights

    @property
    def profile(self) -> Profile:
        return self._sessions[0].profile

    @property
    def follows_patches(self) -> bool:
        return self._last.follows_patches

    @property
    def joins_stacks(self) -> bool:
        return self._last.joins_stacks

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self._last.stream

    @property
    def loaded(self) -> bool:
        return any(session.loaded for session in self._sessions)

    @property
    def bytes(self) -> int:
        return sum(session.bytes for session in self._sessions if session.loaded) or self._last.bytes

    def begin_run(self, patcher: ModelPatcher) -> None:
        for session in [one for one in self._broken if refusal_of(one.engine) is None]:
            del self._broken[session]  # it was built again
        for session in self._sessions:
            session.begin_run(patcher)

    def follow(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        self._of = weakref.ref(network), weakref.ref(patcher)
        self._last.follow(network, patcher)
        self._following = self._last

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        return self._last.owns_weights(patcher)

    def load(self) -> None:
        while True:
            try:
                self._last.load()
                return
            except Unavailable as unavailable:
                self._leave_out(self._last, unavailable)

    def _leave_out(self, session: FileSession, unavailable: Unavailable) -> Unavailable:
        """Go on without an engine that is broken: what its calls get to hear.

        Raises:
            Unavailable: as given, where it is no reason to, or no other is left.
        """
        others = [one for one in self._sessions if one is not session and one not in self._broken]
        if unavailable.fallback.reason not in BROKEN or not others:
            raise unavailable
        refuse(session.engine, unavailable.fallback.detail)
        session.unload()
        self._broken[session] = unavailable.fallback
        self._used = [used for used in self._used if used is not session] or others[:1]
        log.warning("Hybrid TRT: %s; the other engines of this network go on", unavailable)
        return self._is_broken(session)

    def _is_broken(self, session: FileSession) -> Unavailable:
        fallback = self._broken[session]
        return Unavailable(fallback.reason, fallback.detail, others_serve=True)

    def unload(self) -> None:
        for session in self._sessions:
            session.unload()

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        refusals = [self._broken.get(session) or session.serves(sizes) for session in self._sessions]
        return None if None in refusals else refusals[0]

    def lacks(self, profile: Profile, asked: RequestedCalls | None = None) -> bool:
        return all(session.lacks(profile, asked) for session in self._sessions)

    def to_compile(self, profile: Profile, asked: RequestedCalls | None = None) -> list[list[Call]]:
        return []

    def run(
        self, given: Mapping[str, torch.Tensor], extras: Mapping[str, Hashable] | None = None
    ) -> dict[str, torch.Tensor]:
        shapes = tuple(tensor.shape for tensor in given.values())
        chosen = self._choices.get(shapes)
        if chosen is None:
            chosen = self._choose(given)
            if len(self._choices) >= MAX_CHOICES:
                self._choices.clear()
            self._choices[shapes] = chosen
        if chosen in self._broken:
            raise self._is_broken(chosen)
        if chosen is not self._last:
            self._use(chosen)
        if chosen is not self._following:
            self._follow(chosen)
        try:
            return chosen.run(given, extras)
        except Unavailable as unavailable:
            raise self._leave_out(chosen, unavailable) from unavailable

    def _choose(self, given: Mapping[str, torch.Tensor]) -> FileSession:
        for session in self._sessions:
            self._follow(session)  # it then knows what its per-image passes take
            if session.fits(given):
                return session
        return self._sessions[0]

    def _follow(self, session: FileSession) -> None:
        network, patcher = (reference() for reference in self._of)
        session.follow(network, patcher)
        self._following = session

    def _use(self, session: FileSession) -> None:
        """Make a session the latest, and close the one that was used longest ago where it would be one too many."""
        self._used = [used for used in self._used if used is not session and used.loaded]
        while len(self._used) >= MOST_OPEN:
            self._used.pop(0).unload()
        self._used.append(session)

    def status(self, wanted: Profile) -> str:
        first = next((session for session in self._sessions if not session.lacks(wanted)), self._sessions[0])
        others = [session.engine.manifest.identity for session in self._sessions if session is not first]
        words = "; ".join(dict.fromkeys(profile_words(identity.architecture, identity.profile) for identity in others))
        return f"{first.status(wanted)}. Other engines serve {words}"


def several_sizes(sessions: Sequence[FileSession]) -> FileSession | SeveralSizes:
    """The session of these, the best first, shared as they are; of a single one itself."""
    if len(sessions) == 1:
        return sessions[0]
    key = ("several sizes", *map(id, sessions))  # ids come again
    return shared(key, lambda found: found.is_of(sessions), lambda: SeveralSizes(sessions))
