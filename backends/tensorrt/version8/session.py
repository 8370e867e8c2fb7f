"""Engines of one network that take one size each, as one session: each call goes to the engine for its size."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ....architectures import architectures, profile_words
from ....architectures.calls import AsyncInputs, UncoveredCall
from ....architectures.shapes import Profile, Shape
from ....engine_library import Engine, Fallback, Reason, Unavailable
from ....sessions.file_session import FileSession
from ....sessions.session import BROKEN, refusal_of, refuse, shared

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ....comfy_model.network import NativeNetwork

log = logging.getLogger(__name__)

MAX_CHOICES = 64
"""Sets of shapes whose engine is remembered."""


class OneSizeSession:
    """Sessions of one backend's engines with the same weights; see ``Session``.

    The first engine is of the size that the node asks for. The others open when a call of their size comes; the one
    that was used longest ago then closes. A call that no engine is for goes to the first, which says why it cannot
    take it. An engine that cannot be opened leaves the others in service.

    Attributes:
        active: the session that served last.
    """

    refusal: str | None = None
    takes_late = False

    def __init__(self, sessions: Sequence[FileSession], most_open: int):
        self.sessions = tuple(sessions)
        self._most_open = most_open
        self._used = [*(session for session in sessions[1:] if session.loaded), sessions[0]]  # the latest last
        self._choices: dict[tuple[Shape, ...], FileSession] = {}
        self._broken: dict[FileSession, Fallback] = {}
        self._of: tuple[weakref.ref[NativeNetwork], weakref.ref[ModelPatcher]] | None = None
        self._following: FileSession | None = None

    @property
    def active(self) -> FileSession:
        return self._used[-1]

    @property
    def engines(self) -> list[Engine]:
        return [session.engine for session in self.sessions]

    @property
    def parts(self) -> frozenset[FileSession]:
        return frozenset(self.sessions)

    @property
    def follows_patches(self) -> bool:
        return self.active.follows_patches

    @property
    def joins_stacks(self) -> bool:
        return self.active.joins_stacks

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.active.stream

    @property
    def loaded(self) -> bool:
        return any(session.loaded for session in self.sessions)

    @property
    def bytes(self) -> int:
        return sum(session.bytes for session in self.sessions if session.loaded) or self.active.bytes

    def begin_run(self, patcher: ModelPatcher) -> None:
        for session in [one for one in self._broken if refusal_of(one.engine) is None]:
            del self._broken[session]  # it was built again
        for session in self.sessions:
            session.begin_run(patcher)

    def sync_from(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        self._of = weakref.ref(network), weakref.ref(patcher)
        self.active.sync_from(network, patcher)
        self._following = self.active

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        return self.active.owns_weights(patcher)

    def load(self) -> None:
        while True:
            try:
                self.active.load()
                return
            except Unavailable as unavailable:
                self._leave_out(self.active, unavailable)

    def unload(self) -> None:
        for session in self.sessions:
            session.unload()

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        refusals = [self._broken.get(session) or session.serves(sizes) for session in self.sessions]
        return None if None in refusals else refusals[0]

    def run(
        self,
        given: Mapping[str, torch.Tensor],
        extras: Mapping[str, Hashable] | None = None,
        late: AsyncInputs | None = None,
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
        if chosen is not self.active:
            self._use(chosen)
        if chosen is not self._following:
            self._follow(chosen)
        try:
            return chosen.run(given, extras)
        except Unavailable as unavailable:
            if unavailable.fallback.reason is Reason.SHAPE_OUTSIDE_PROFILE:
                raise self._uncovered(unavailable.fallback) from unavailable
            raise self._leave_out(chosen, unavailable) from unavailable

    def _choose(self, given: Mapping[str, torch.Tensor]) -> FileSession:
        for session in self.sessions:
            self._follow(session)  # it then knows what its per-image passes take
            if session.fits(given):
                return session
        return self.sessions[0]

    def _follow(self, session: FileSession) -> None:
        network, patcher = (reference() for reference in self._of)
        session.sync_from(network, patcher)
        self._following = session

    def _use(self, session: FileSession) -> None:
        """Make a session the latest, and close the one that was used longest ago where it would be one too many."""
        self._used = [used for used in self._used if used is not session and used.loaded]
        while len(self._used) >= self._most_open:
            self._used.pop(0).unload()
        self._used.append(session)

    def _uncovered(self, fallback: Fallback) -> Unavailable:
        """The error for a call that an engine of its own size would serve."""
        identity = self.sessions[0].engine.manifest.identity
        call = {symbol: size for symbol, size in fallback.sizes.items() if symbol in identity.profile.ranges}
        words = architectures()[identity.architecture].call_words(call)
        uncovered = UncoveredCall(frozenset(call.items()), words, "native")
        return Unavailable(fallback.reason, fallback.detail, sizes=fallback.sizes, uncovered=uncovered)

    def _leave_out(self, session: FileSession, unavailable: Unavailable) -> Unavailable:
        """Go on without an engine that is broken, and return the error for its calls.

        Raises:
            Unavailable: as given, where the engine is not broken or no other is left.
        """
        others = [one for one in self.sessions if one is not session and one not in self._broken]
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
        return Unavailable(fallback.reason, fallback.detail, this_call_only=True)

    def status(self, wanted: Profile, beyond: str = "run at normal speed") -> str:
        identities = [session.engine.manifest.identity for session in self.sessions]
        words = dict.fromkeys(profile_words(identity.architecture, identity.profile) for identity in identities)
        size = sum(session.engine.manifest.bytes for session in self.sessions)
        text = f"{identities[0].backend} {identities[0].precision}, {'; '.join(words)}, {size / 1e6:.0f} MB"
        if identities[0].any_weights:
            text += ", takes any LoRA"
        return f"{text}. Each engine takes one size: pictures of other sizes {beyond}"


def one_size_session(sessions: Sequence[FileSession], most_open: int) -> OneSizeSession:
    """The session of these, the best first, shared by all who use the same.

    Args:
        most_open: so many of them are open at once.
    """
    key = ("one size", *map(id, sessions))  # ids come again
    wanted = tuple(sessions)
    return shared(key, lambda found: found.sessions == wanted, lambda: OneSizeSession(sessions, most_open))
