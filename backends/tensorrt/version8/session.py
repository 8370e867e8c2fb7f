"""Engines of one network that take one size each, as one session: each call goes to the engine for its size."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ....architectures import architectures, profile_words
from ....architectures.calls import AsyncInputs, UncoveredCall
from ....architectures.shapes import Profile, Shape
from ....engine_library import Fallback, Reason, Unavailable
from ....sessions.choice import SessionChoice
from ....sessions.file_session import FileSession
from ....sessions.session import shared

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ....comfy_model.network import NativeNetwork

MAX_CHOICES = 64
"""Sets of shapes whose engine is remembered."""


class OneSizeSession(SessionChoice):
    """Sessions of one backend's engines with the same weights.

    The first engine is of the size that the node asks for. Each further engine opens when a call of its size comes;
    the engine that was used longest ago then closes. A call that no engine is for goes to the first, which says why
    it cannot take it.
    """

    sessions: tuple[FileSession, ...]

    def __init__(self, sessions: Sequence[FileSession], most_open: int):
        super().__init__(sessions)
        self._most_open = most_open
        self._used = [*(session for session in sessions[1:] if session.loaded), sessions[0]]  # the latest last
        self._choices: dict[tuple[Shape, ...], FileSession] = {}
        self._of: tuple[weakref.ref[NativeNetwork], weakref.ref[ModelPatcher]] | None = None

    def sync_from(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        self._of = weakref.ref(network), weakref.ref(patcher)
        self._chosen.sync_from(network, patcher)

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
        if chosen is not self._chosen:
            self._use(chosen)
            self._follow(chosen)
        try:
            return chosen.run(given, extras)
        except Unavailable as unavailable:
            if unavailable.fallback.reason is Reason.SHAPE_OUTSIDE_PROFILE:
                raise self._uncovered(unavailable.fallback) from unavailable
            self._leave_out(chosen, unavailable)
            raise self._is_broken(chosen) from unavailable

    def _choose(self, given: Mapping[str, torch.Tensor]) -> FileSession:
        for session in self.sessions:
            self._follow(session)  # it then knows what its per-image passes take
            if session.fits(given):
                return session
        return self.sessions[0]

    def _follow(self, session: FileSession) -> None:
        network, patcher = (reference() for reference in self._of)
        session.sync_from(network, patcher)

    def _use(self, session: FileSession) -> None:
        """Make a session the latest, and close the one that was used longest ago where it would be one too many."""
        self._used = [used for used in self._used if used is not session and used.loaded]
        while len(self._used) >= self._most_open:
            self._used.pop(0).unload()
        self._used.append(session)
        self._chosen = self._served = session

    def _uncovered(self, fallback: Fallback) -> Unavailable:
        """The error for a call that an engine of its own size would serve."""
        identity = self.sessions[0].engine.manifest.identity
        call = {symbol: size for symbol, size in fallback.sizes.items() if symbol in identity.profile.ranges}
        words = architectures()[identity.architecture].call_words(call)
        uncovered = UncoveredCall(frozenset(call.items()), words, "native")
        return Unavailable(fallback.reason, fallback.detail, sizes=fallback.sizes, uncovered=uncovered)

    def _leave_out(self, session: FileSession, unavailable: Unavailable) -> None:
        super()._leave_out(session, unavailable)
        self._use(self._chosen)

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
