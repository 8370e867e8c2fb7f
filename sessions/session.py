"""What serves a network's calls, from an engine's files or from live weights: nobody else needs to know which."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..architectures.shapes import Profile, ShapeMismatch
from ..architectures.sizes import Picture
from ..architectures.wanted_calls import Call
from ..engine_library import Engine, Fallback, Reason, Unavailable

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher

    from ..comfy_model.network import NativeNetwork


@dataclass(frozen=True)
class RequestedCalls:
    """What is known of a network's calls before they are made.

    Attributes:
        pictures: those that the graph asks for, as far as it tells.
        seen: the calls of the last run that ran uncompiled, or None when no run is known.
    """

    pictures: Sequence[Picture] = ()
    seen: Sequence[Call] | None = None


class Runner(Protocol):
    """A loaded engine.

    Attributes:
        device: where inputs and outputs have to be.
        bytes: memory that it holds, estimated.
        capturable: whether its runs may be recorded as CUDA graphs.
    """

    device: torch.device
    bytes: int
    capturable: bool

    def new_context(self) -> Runner:
        """A runner of the same loaded engine for calls of one set of shapes: what it has run stays valid for a graph.

        Only where runs are capturable.

        Raises:
            Unavailable: there is no room for it.
        """
        ...

    def refit(self, weights: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
        """Compute with other weights from now on; nothing of this engine may be running.

        Only of engines that take any weights, and before their first run; contexts take them too.

        Args:
            weights: initialiser of the graph -> contiguous tensor in main memory, in the engine's precision; computed
                when it is asked for.
            changed: those that differ from what the engine has.

        Raises:
            RuntimeError: it has to have a weight that nobody gave, or refused one.
        """
        ...

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Compute into ``outputs``. All tensors contiguous, on ``device``, with the dtypes and shapes of the engine."""
        ...


@dataclass(frozen=True)
class UncoveredCall:
    """A call that ran without a compiled file.

    Attributes:
        sizes: those of the call, (symbol, size).
        words: the same for people.
        graph: whether it ran as a CUDA graph.
    """

    sizes: frozenset[tuple[str, int]]
    words: str
    graph: bool


class Session(Protocol):
    """Serves the calls of a network on one device; shared by all who use the same engine or the same live weights.

    Attributes:
        backend_name: who serves.
        name: what serves, for reports.
        engines: what it uses of the library; a folder that was built again is another engine.
        weights: what stands for the weights in its engines' identities.
        profile: what its engine was built for, or None without one.
        follows_patches: whether it computes with whatever weights ComfyUI samples with, so that LoRAs need no engine
            of their own; it then lives as long as the native module, and else as long as prompts use it.
        joins_stacks: whether it may run beside others on a stream of its own; see ``stream``.
        takes_late: whether ``run`` takes inputs that another stream still computes, its ``late``.
        refusal: why an engine that is there was not opened although calls are served, or None.
        uncompiled: the last call, where it ran without a compiled file although its backend compiles, or None.
        serving: the engines that had a part in the last call.
        plain: why the last call ran without a CUDA graph although such calls are recorded, or None.
        loaded: whether it holds its memory.
        bytes: memory that it holds beside ComfyUI's own weights, or will hold once it has run.
        parts: the sessions that hold that memory: itself, or those that it is made of.
    """

    backend_name: str
    name: str
    engines: Sequence[Engine]
    weights: str
    profile: Profile | None
    follows_patches: bool
    joins_stacks: bool
    takes_late: bool
    refusal: str | None
    uncompiled: UncoveredCall | None
    serving: Sequence[Engine]
    plain: str | None
    loaded: bool
    bytes: int
    parts: frozenset[Session]

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """A stream that no other session uses, or None where it has none.

        Results of a call on it may be lent: this session's next call, or that of a session with a part in common,
        writes to them.
        """
        ...

    def begin_run(self, patcher: ModelPatcher) -> None:
        """A sampling run with a patcher starts: ComfyUI may have moved weights."""
        ...

    def follow(self, network: NativeNetwork, patcher: ModelPatcher) -> None:
        """Serve this network with a patcher's weights from the next call on. Asked before every call, so it is cheap.

        Raises:
            Unavailable: another node replaced a part of the network.
        """
        ...

    def owns_weights(self, patcher: ModelPatcher) -> bool:
        """Whether native weights that ComfyUI loads for a patcher would lie beside those of the session, unused."""
        ...

    def load(self) -> None:
        """Take the memory that it needs.

        Raises:
            Unavailable: there is not enough, or the engine cannot be opened.
        """
        ...

    def unload(self) -> None:
        """Give its memory back; the next call takes it again."""
        ...

    def serves(self, sizes: Mapping[str, int]) -> Fallback | None:
        """Why calls of these sizes are not served, or None."""
        ...

    def lacks(self, profile: Profile, asked: RequestedCalls | None = None) -> bool:
        """Whether a build for this profile would serve more calls, or faster.

        Args:
            asked: what is known of the calls, for what has a compiled file for each set of sizes.
        """
        ...

    def to_compile(self, profile: Profile, asked: RequestedCalls | None = None) -> list[list[Call]]:
        """The calls that a build should compile for, those of one engine together; see ``calls_to_compile``. None where
        an engine serves all sizes of its profile alike."""
        ...

    def run(
        self, given: Mapping[str, torch.Tensor], extras: Mapping[str, Hashable] | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute one call.

        Args:
            given: input name -> tensor of any float dtype on any device. Inputs of a per-image pass are passed on
                unchanged. Absent optional inputs count as zeros.
            extras: see ``EngineCall``.

        Returns:
            Output name -> fresh tensor on the session's device, which the caller owns.

        Raises:
            Unavailable: the call does not fit this engine, or the engine failed.
        """
        ...

    def status(self, wanted: Profile) -> str:
        """One sentence for the node, which wants a profile."""
        ...


class DelegateToActive:
    """What a session made of others says of itself: what the one that served last, ``_last``, says."""

    _last: Session
    takes_late = False

    @property
    def backend_name(self) -> str:
        return self._last.backend_name

    @property
    def name(self) -> str:
        return self._last.name

    @property
    def serving(self) -> Sequence[Engine]:
        return self._last.serving

    @property
    def plain(self) -> str | None:
        return self._last.plain


Found = TypeVar("Found", bound=Session)

_open: weakref.WeakValueDictionary[tuple, Session] = weakref.WeakValueDictionary()


def shared(key: tuple, fits: Callable[[Found], bool], make: Callable[[], Found]) -> Found:
    """The open session with a key, if it still fits, or a new one; it closes when nobody uses it any more."""
    found = _open.get(key)
    if found is None or not fits(found):
        found = _open[key] = make()
    return found


def open_engines() -> list[Engine]:
    """The engines that somebody holds a session of."""
    return [engine for session in list(_open.values()) for engine in session.engines]


_refused: dict[str, tuple[object, str]] = {}


BROKEN = (Reason.BROKEN_ENGINE, Reason.WRONG_GPU)
"""Why an engine is left alone until it is built again. One that failed is not: it may have lacked memory, as live
weights then would too."""


def refuse(engine: Engine, why: str) -> None:
    """Remember that an engine could not be opened, or run, in this process; one that is built again is tried again."""
    _refused[str(engine.folder)] = (engine.manifest, why)


def refusal_of(engine: Engine) -> str | None:
    """Why an engine could not be opened in this process, or None."""
    manifest, why = _refused.get(str(engine.folder), (None, None))
    return why if manifest == engine.manifest else None


def misfit(error: ShapeMismatch) -> Unavailable:
    """Raised for a call whose tensors fit the network in no size."""
    return Unavailable(Reason.OTHER_KIND if error.other_kind else Reason.UNSUPPORTED_INPUT, str(error))


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
