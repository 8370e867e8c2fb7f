"""Calls that engines served: counted, and listed for larger CUDA graphs that repeat them."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine_library import Unavailable, inventory, measurements
from ..sessions.session import Active, Session
from .call_stats import CallStats

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .engine_handle import EngineHandle


@dataclass(frozen=True)
class ServedCall:
    """A call that an engine served.

    Attributes:
        session: the handle's session; ``served`` is the part of it that served.
        patcher: the patcher that ComfyUI sampled with, or None for the network's own.
        beside: whether it started beside ControlNets and waited for them on the way.
    """

    handle: EngineHandle
    stats: CallStats
    session: Session
    served: Active
    patcher: ModelPatcher | None
    beside: bool

    def count(self) -> None:
        """Count the call; also each time that a larger graph repeats it."""
        stats, served = self.stats, self.served
        uncovered = None if self.handle.network.keeps_tokens else served.uncovered  # nothing is compiled for such calls
        stats.count_engine(served.backend_name, uncovered, self.beside)
        if (why := served.plain) is not None:
            stats.count_plain(why)
        if stats.engine_name != served.name:  # the first call of a run
            inventory.mark_used(served.serving)
            stats.proof = measurements.call_times(served.serving)
        stats.engine_name = served.name

    def state(self) -> Hashable | None:
        """Return a key of the engine's state; None if it would not serve the call again, or if calls are timed."""
        handle = self.handle
        stats = handle.begin_run(self.patcher)
        if stats is not self.stats or stats.times is not None or handle.session is not self.session:
            return None
        if handle.why_native_now() is not None:
            return None
        try:
            self.session.sync_from(handle.network, self.patcher or handle.network.patcher)
            return self.served.state()
        except Unavailable:
            return None


Calls = list[ServedCall | None]

_listed: ContextVar[Calls | None] = ContextVar("hybrid_trt_listed_calls", default=None)


@contextlib.contextmanager
def calls_listed() -> Iterator[Calls]:
    """List the calls inside in order, None for native calls; the caller has to count the engines' calls."""
    calls: Calls = []
    token = _listed.set(calls)
    try:
        yield calls
    finally:
        _listed.reset(token)


def served_by_engine(call: ServedCall) -> None:
    """Count a call, or list it."""
    listed = _listed.get()
    if listed is None:
        call.count()
    else:
        listed.append(call)


def served_by_native() -> None:
    """List a native call."""
    listed = _listed.get()
    if listed is not None:
        listed.append(None)
