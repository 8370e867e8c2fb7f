"""An engine and, behind it, live weights: they take the calls that the engine cannot, so that native need not."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..architectures.calls import AsyncInputs
from ..architectures.shapes import Profile
from ..comfy_model.weight_patches import WeightPatches
from ..engine_library import Engine, Fallback, Reason, Unavailable
from .session import BROKEN, Active, Session, refusal_of, refuse, shared

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher

    from ..comfy_model.network import NativeNetwork

log = logging.getLogger(__name__)


class WithLiveFallback:
    """A session of an engine; see ``Session``. Live weights serve where sizes or weight patches are not the engine's,
    and in the place of one that cannot be opened.

    They take their memory with the first such call. To the rest of the pack this is one session, whose memory is that
    of both.

    Attributes:
        active: the one that served last.
    """

    follows_patches = True
    takes_late = False

    def __init__(self, engine: Session, live: Session, network: NativeNetwork):
        self._engine, self._live = engine, live
        self._of = weakref.ref(network.patcher)
        self._patches = WeightPatches(network.patcher)
        self._chosen = self._served = engine
        self._given_up = False

    def joins(self, engine: Session, live: Session, network: NativeNetwork) -> bool:
        """Tell whether it is of these two, with the weights that a network's patcher has now."""
        same = (self._engine, self._live, self._of()) == (engine, live, network.patcher)
        return same and self._patches.same_on(network.patcher)

    @property
    def active(self) -> Active:
        return self._served.active

    @property
    def engines(self) -> Sequence[Engine]:
        return self._engine.engines

    @property
    def joins_stacks(self) -> bool:
        return self._engine.joins_stacks

    @property
    def refusal(self) -> str | None:
        return next(filter(None, map(refusal_of, self._engine.engines)), self._engine.refusal)

    @property
    def loaded(self) -> bool:
        return self._engine.loaded or self._live.loaded

    @property
    def bytes(self) -> int:
        loaded = [one for one in (self._engine, self._live) if one.loaded]
        return sum(one.bytes for one in loaded or [self._chosen])

    @property
    def parts(self) -> frozenset[Session]:
        return self._engine.parts | self._live.parts

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self._engine.stream

    def begin_run(self, patcher: ModelPatcher) -> None:
        refused = [refusal_of(engine) is not None for engine in self._engine.engines]
        self._given_up = all(refused) or self._engine.refusal is not None
        self._choose(patcher)
        self._engine.begin_run(patcher)
        self._live.begin_run(patcher)

    def sync_from(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        self._choose(patcher)
        self._live.sync_from(network, patcher)
        if self._chosen is self._engine:
            self._engine.sync_from(network, patcher)

    def _choose(self, patcher: ModelPatcher) -> None:
        has_its_weights = self._engine.follows_patches or self._patches.same_on(patcher)
        self._chosen = self._engine if has_its_weights and not self._given_up else self._live

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        return self._chosen.owns_weights(patcher)

    def load(self) -> None:
        try:
            self._chosen.load()
        except Unavailable as unavailable:
            self._give_up(unavailable)
            self._live.load()

    def _give_up(self, unavailable: Unavailable) -> None:
        """Leave the engine to what broke it; raises what is no reason to."""
        if self._chosen is self._live or unavailable.fallback.reason not in BROKEN:
            raise unavailable
        for engine in self._engine.active.serving:
            refuse(engine, unavailable.fallback.detail)
        self._given_up, self._chosen = True, self._live
        self._engine.unload()
        log.warning("Hybrid TRT: %s: %s; torch runs in its place", self._engine.active.name, unavailable)

    def unload(self) -> None:
        self._engine.unload()
        self._live.unload()

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        return self._engine.serves(sizes) and self._live.serves(sizes)

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
                self._give_up(unavailable)
        self._served = self._live
        return self._live.run(given, extras)

    def status(self, wanted: Profile, beyond: str = "run at normal speed") -> str:
        if self.refusal is not None:
            engine = self._engine.active
            text = f"{engine.name} is not used: {self.refusal}; delete it, or build it again with {engine.backend_name}"
            return f"{self._live.status(wanted)}. {text}"
        return self._engine.status(wanted, f"run on {self._live.active.backend_name}'s live weights")


def with_live_fallback(engine: Session, live: Session, network: NativeNetwork) -> WithLiveFallback:
    """The session of an engine with live weights behind it, shared as these two are.

    Args:
        network: whose weights the engine has, patches included.
    """
    key = ("backed by live", id(engine), id(live), id(network.patcher))
    # ids come again
    return shared(key, lambda s: s.joins(engine, live, network), lambda: WithLiveFallback(engine, live, network))
