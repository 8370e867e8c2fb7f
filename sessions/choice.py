"""Several sessions of a network as a single session: each call goes to the first that takes it, broken ones aside."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..architectures.calls import AsyncInputs
from ..architectures.shapes import Profile
from ..comfy_model.weight_patches import WeightPatches
from ..engine_library import Engine, Fallback, Reason, Unavailable
from .session import Active, Session, refusal_of, refuse, shared

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher

    from ..comfy_model.network import NativeNetwork

log = logging.getLogger(__name__)


class SessionChoice:
    """Sessions of a network as a single ``Session``, which holds the memory of all.

    Attributes:
        sessions: the sessions to choose from, the best first.
    """

    refusal: str | None = None
    takes_late = False
    calls_attention = False

    def __init__(self, sessions: Sequence[Session]):
        self.sessions = tuple(sessions)
        self._chosen = self._served = self.sessions[0]  # for the next call, and by the last one
        self._broken: dict[Session, Fallback] = {}

    @property
    def active(self) -> Active:
        return self._served.active

    @property
    def engines(self) -> Sequence[Engine]:
        return [engine for session in self.sessions for engine in session.engines]

    @property
    def parts(self) -> frozenset[Session]:
        return frozenset().union(*(session.parts for session in self.sessions))

    @property
    def follows_patches(self) -> bool:
        return self._chosen.follows_patches

    @property
    def joins_stacks(self) -> bool:
        return self._chosen.joins_stacks

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self._chosen.stream

    @property
    def remark(self) -> str:
        return self._chosen.remark

    @property
    def loaded(self) -> bool:
        return any(session.loaded for session in self.sessions)

    @property
    def bytes(self) -> int:
        return sum(session.bytes for session in self.sessions if session.loaded) or self._chosen.bytes

    def begin_run(self, patcher: ModelPatcher) -> None:
        for session in self.sessions:
            if not all(map(refusal_of, session.engines)):  # it was built again
                self._broken.pop(session, None)
            session.begin_run(patcher)

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        return self._chosen.owns_weights(patcher)

    def load(self, most: float = math.inf) -> None:
        while True:
            try:
                self._chosen.load(most)
                return
            except Unavailable as unavailable:
                self._leave_out(self._chosen, unavailable)

    def _leave_out(self, session: Session, unavailable: Unavailable) -> None:
        """Go on without a session whose engine is broken.

        Raises:
            Unavailable: as given, where the engine is not broken or no other session is left.
        """
        left = [other for other in self.sessions if other is not session and other not in self._broken]
        if not unavailable.fallback.reason.breaks_engine or not left:
            raise unavailable
        for engine in session.active.serving:
            refuse(engine, unavailable.fallback.detail)
        self._broken[session], self._chosen = unavailable.fallback, left[0]
        log.warning("Hybrid TRT: %s is left out, and others take its calls (%s)", session.active.name, unavailable)
        session.unload()

    def unload(self) -> None:
        for session in self.sessions:
            session.unload()

    def give_back(self, size: int, planning: bool = False) -> int:
        return sum(session.give_back(size, planning) for session in self.sessions if session.loaded)

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        refusals = [self._broken.get(session) or session.serves(sizes) for session in self.sessions]
        return None if None in refusals else refusals[0]


class WithLiveFallback(SessionChoice):
    """A session of an engine, with live weights for calls whose sizes or weight patches are not the engine's."""

    follows_patches = True

    def __init__(self, engine: Session, live: Session, network: NativeNetwork):
        super().__init__((engine, live))
        self._engine, self._live = engine, live
        self._of = weakref.ref(network.patcher)
        self._patches = WeightPatches(network.patcher)

    def joins(self, engine: Session, live: Session, network: NativeNetwork) -> bool:
        """Tell whether it has these sessions, and the engine the weights that the network's patcher has now."""
        same = (self._engine, self._live, self._of()) == (engine, live, network.patcher)
        return same and self._patches.same_on(network.patcher)

    @property
    def engines(self) -> Sequence[Engine]:
        return self._engine.engines

    @property
    def joins_stacks(self) -> bool:
        return self._engine.joins_stacks

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self._engine.stream

    @property
    def refusal(self) -> str | None:
        return next(filter(None, map(refusal_of, self._engine.engines)), None)

    def begin_run(self, patcher: ModelPatcher) -> None:
        super().begin_run(patcher)
        if all(refused := [refusal_of(engine) for engine in self._engine.engines]):
            self._broken[self._engine] = Fallback(Reason.BROKEN_ENGINE, refused[0])
        self._choose(patcher)

    def sync_from(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        self._choose(patcher)
        self._live.sync_from(network, patcher)
        if self._chosen is self._engine:
            self._engine.sync_from(network, patcher)

    def _choose(self, patcher: ModelPatcher) -> None:
        has_its_weights = self._engine.follows_patches or self._patches.same_on(patcher)
        self._chosen = self._engine if has_its_weights and self._engine not in self._broken else self._live

    def _leave_out(self, session: Session, unavailable: Unavailable) -> None:
        if session is self._live:  # the engine may have other weights
            raise unavailable
        super()._leave_out(session, unavailable)

    def run(
        self,
        given: Mapping[str, torch.Tensor],
        extras: Mapping[str, Hashable] | None = None,
        late: AsyncInputs | None = None,
    ) -> dict[str, torch.Tensor]:
        self._served = self._chosen
        try:
            return self._chosen.run(given, extras)
        except Unavailable as unavailable:
            fallback = unavailable.fallback
            of_this_call = fallback.reason is Reason.SHAPE_OUTSIDE_PROFILE or fallback.this_call_only
            if self._chosen is self._live or not of_this_call:
                self._leave_out(self._chosen, unavailable)
        self._served = self._live
        return self._live.run(given, extras)

    def status(self, wanted: Profile, beyond: str = "run at normal speed") -> str:
        if self.refusal is not None:
            engine = self._engine.active
            text = f"{engine.name} is not used: {self.refusal}; delete it, or build it again with {engine.backend_name}"
            return f"{self._live.status(wanted)}. {text}"
        return self._engine.status(wanted, f"run on {self._live.active.backend_name}'s live weights")


def with_live_fallback(engine: Session, live: Session, network: NativeNetwork) -> WithLiveFallback:
    """Return the session of an engine with live weights behind it; all users of both sessions share it.

    Args:
        network: whose weights the engine has, patches included.
    """
    key = ("backed by live", id(engine), id(live), id(network.patcher))
    # an id may be that of an earlier object, hence ``joins``
    return shared(key, lambda s: s.joins(engine, live, network), lambda: WithLiveFallback(engine, live, network))
