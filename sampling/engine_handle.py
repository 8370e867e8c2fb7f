"""What an engine node hands on: which engine a network wants, looked up anew for every sampling run."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..architectures import Role
from ..architectures.calls import Binding, EngineCall, OtherKind, Unsupported
from ..architectures.shapes import Profile
from ..architectures.sizes import Picture
from ..backends import AUTO, Backend, backends, find_engines, gpu_of, serving_backends
from ..comfy_model.attention import remark
from ..comfy_model.network import NativeNetwork
from ..comfy_model.structure_hash import structure_hash
from ..engine_library import Engine, EngineQuery, Fallback, Library, Reason, Unavailable, last_use
from ..sessions.gpu_memory import close_engines
from ..sessions.session import RequestedCalls, Session, UncoveredCall
from ..sessions.several_sizes import MOST_OPEN
from ..sessions.with_live_fallback import with_live_fallback
from . import Shared
from .call_stats import CallStats, last_run, named_range, open_stats, timed
from .engine_patcher import EnginePatcher, keep, keep_beside
from .nan_guard import why_again
from .native_network import NetworkWatch
from .run_context import executing

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy_execution.utils import ExecutionContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineChoice:
    """The engine node's settings: for which shapes, how precise (``auto``: as native), by which backend (``auto``).

    Attributes:
        replaceable: whether only an engine will do that takes any weights, where its backend can have such.
        pictures: those that the graph asks for, as far as it tells.
    """

    profile: Profile
    precision: str = AUTO
    backend: str = AUTO
    replaceable: bool = False
    pictures: tuple[Picture, ...] = ()


class EngineHandle(Shared):
    """Stands for "the engine of this network" until a call needs it.

    The library is asked again at the start of every sampling run, so an engine that was built, replaced, damaged or
    deleted since the node ran is noticed, without the node running again.
    """

    def __init__(
        self, network: NativeNetwork, choice: EngineChoice, library: Library, node_id: str, node_key: str = ""
    ):
        self.network = network
        self.choice = choice
        self.library = library
        self.node_id = node_id
        self.node_key = node_key
        self.patcher = EnginePatcher.on(network.device, self)  # by which ComfyUI's memory management sees the engine
        self.bind: Binding | None = None  # there whenever a session is
        self.fallback: Fallback | None = None
        self.takes_any_weights = False  # whether the engine that it wants does
        self.note = ""  # what the node says besides, for example that a build is under way
        self.stats: CallStats | None = None
        # no execution context is this object: the first question begins a run
        self._context: object = self
        self._looked_up_in: object = self
        self._beginning = threading.Lock()
        self._watch = NetworkWatch(network)
        named = partial(named_range, f"Hybrid TRT {network.role.value} {network.label}")
        self._range = named if network.device.type == "cuda" else nullcontext
        self.refresh()

    @property
    def session(self) -> Session | None:
        """The engine that serves, or None when native does."""
        return self.patcher.model.session

    @session.setter
    def session(self, found: Session | None) -> None:
        self.patcher.model.session = found

    @property
    def precision(self) -> str:
        return self.network.precision if self.choice.precision == AUTO else self.choice.precision

    @property
    def profile(self) -> Profile:
        """The shapes that the node wants an engine for, or the first one."""
        return self.profiles[0]

    @property
    def profiles(self) -> list[Profile]:
        """The shapes that the node wants engines for: of a backend whose engines are for one size one for each picture
        of the graph, or where the graph does not tell the profile's best one, and for what the last run lacked."""
        profile = self.choice.profile
        if not self._one_size:
            return [profile]
        found: list[Profile] = []
        pictures = [Profile.around(calls).at_best() for calls in self._of_pictures()]
        for best in [*(pictures or [profile.at_best()]), *self._unserved()]:
            if best not in found:
                found.append(best)
        return found

    def _of_pictures(self) -> list[list[dict[str, int]]]:
        """The calls that sample each of the graph's pictures."""
        architecture = self.network.architecture()
        return [architecture.calls(self.choice.profile, picture) for picture in self.choice.pictures]

    @property
    def _one_size(self) -> bool:
        backend = backends().get(self.choice.backend)
        return backend is not None and backend.one_size

    def _unserved(self) -> list[Profile]:
        """The sizes that most calls of the last run had which ran native for want of an engine of their size."""
        run = last_run(self.node_key) if self.node_key else None
        calls: Counter[UncoveredCall] = Counter()
        for row in run[1] if run is not None else ():
            calls.update(row.unserved.copy())  # a run may be under way
        usual = self.choice.profile.sizes("opt")
        return [Profile.around([usual | dict(call.sizes)]) for call, _ in calls.most_common(MOST_OPEN)]

    def _wanted(self, sizes: Mapping[str, int]) -> UncoveredCall | None:
        """A call that ran native for its sizes, where an engine for them may be built; None where it may not."""
        if not sizes or not self._one_size:
            return None
        ranges = self.choice.profile.ranges
        call = {symbol: size for symbol, size in sizes.items() if symbol in ranges}
        drawn = [own for calls in self._of_pictures() for own in calls]
        if not all(ranges[s].contains(n) or any(n == own[s] for own in drawn) for s, n in call.items()):
            return None
        return UncoveredCall(frozenset(call.items()), self.network.architecture().call_words(call), graph=False)

    @property
    def follows_patches(self) -> bool:
        """Whether LoRAs and other weight patches need no engine of their own."""
        return self.session is not None and self.session.follows_patches

    @property
    def refusal(self) -> str | None:
        """Why the engine that is there was not opened although the node serves without it, or None."""
        return None if self.session is None else self.session.refusal

    @property
    def asked(self) -> RequestedCalls:
        """What is known of the network's calls: from the graph, and from the last run."""
        run = last_run(self.node_key) if self.node_key else None
        seen = None if run is None else [dict(call.sizes) for row in run[1] for call in row.uncompiled]
        return RequestedCalls(self.choice.pictures, seen)

    @property
    def takes_late(self) -> bool:
        """Whether calls may have inputs that another stream still computes."""
        return self.session is not None and self.session.takes_late

    @property
    def lacks(self) -> bool:
        """Whether a build would serve more calls than the session does, or faster."""
        return self.session is not None and any(self.session.lacks(profile, self.asked) for profile in self.profiles)

    @property
    def misses(self) -> bool:
        """Whether the graph's own pictures, as far as it tells them, run native."""
        if self.session is None:
            return True
        return any(self.session.serves(calls[0]) is not None for calls in self._of_pictures() if calls)

    def of(self, network: NativeNetwork) -> EngineHandle:
        """The handle of the same node for another network of its kind."""
        other = EngineHandle(network, self.choice, self.library, self.node_id, self.node_key)
        failed = self.fallback is not None and self.fallback.reason is Reason.BUILD_FAILED
        if failed and other.session is None and other.fallback.reason is Reason.NO_ENGINE:
            other.fallback = self.fallback
        return other

    def refresh(self) -> None:
        """Look the engine up in the library: afterwards either ``session`` or ``fallback`` is set."""
        try:
            self.session, self.fallback = self._look_up(), None
        except Unavailable as refusal:
            failed = self.fallback is not None and self.fallback.reason is Reason.BUILD_FAILED
            if not (failed and refusal.fallback.reason is Reason.NO_ENGINE):  # why there is none says more
                self.fallback = refusal.fallback
            self.session = None
        except OSError as error:
            self.session, self.fallback = None, Fallback(Reason.NO_ENGINE, f"the library cannot be read ({error})")
        except Exception as error:  # whatever a model of another kind brings, native can sample it
            log.exception("Hybrid TRT: no engine could be looked up for %s", self.network.label)
            what = f"looking the engine up failed ({type(error).__name__}: {error})"
            self.session, self.fallback = None, Fallback(Reason.ENGINE_FAILED, what)

    def _look_up(self) -> Session:
        self.network.undo_foreign_patches()
        self._watch.begin()
        architecture = self.network.unchanged_architecture(self._watch.layers)
        self.bind = architecture.binding(self.network.module)
        device = self.network.device
        usable = serving_backends(self.choice.backend, device, self.library, architecture.name)
        self.takes_any_weights = self.choice.replaceable and any(backend.refits for backend in usable.values())
        weights = self._weights(architecture.name, usable.values())
        layout = structure_hash(self.network.module)
        wanted = EngineQuery(
            architecture.name, weights, self.precision, self.profile, list(usable), gpu_of(device), layout=layout
        )
        live = next((backend for backend in usable.values() if backend.runs_live_weights), None)
        try:
            engines, passed_over = find_engines(self.library, wanted, self.choice.backend, usable, device), None
        except Unavailable as unavailable:
            if live is None:
                raise
            engines, passed_over = [], unavailable.fallback
        backend = usable[engines[0].manifest.identity.backend] if engines else live
        found = self._session_of(backend, engines, passed_over)
        if live in (None, backend):
            return found
        try:
            return with_live_fallback(found, self._session_of(live, engines, None), self.network)
        except Unavailable:  # another node replaced a part of the network
            return found

    def _session_of(self, backend: Backend, engines: Sequence[Engine], passed_over: Fallback | None) -> Session:
        its = [engine for engine in engines if engine.manifest.identity.backend == backend.name]
        return backend.session(self.network, its, self.precision, passed_over)

    def _weights(self, architecture: str, backends: Collection[Backend]) -> list[str]:
        """What engines may have as their weights. No checkpoint is hashed to learn that none can be its own."""
        fixed = [b for b in backends if not b.runs_live_weights and not (self.choice.replaceable and b.refits)]
        found = []
        network, names = self.network, [b.name for b in fixed]
        if fixed and self.library.may_have(architecture, network.fingerprint, names, network.other_hashes()):
            found.append(network.weights_hash())
        if any(backend.runs_live_weights or backend.refits for backend in backends):
            found.append(structure_hash(self.network.module))
        if not found:
            raise self.library.nothing_found()
        return found

    def plan(self, patcher: ModelPatcher | None = None) -> None:
        """ComfyUI is about to plan memory for a run: look the engine up, once per execution of a sampling node.

        Args:
            patcher: the one that ComfyUI will sample with, when it is not the network's own.
        """
        context = executing()
        if context is not self._looked_up_in:
            self._looked_up_in = context
            self.refresh()
            self.patcher.model.expected = self.fallback is None
        if self.session is not None:
            self.session.begin_run(patcher or self.network.patcher)

    def models_beside(self) -> list[ModelPatcher]:
        """What ComfyUI shall load for a run besides the engine: a ControlNet's native weights where none serves."""
        if self.network.role is Role.BACKBONE:
            return []  # its sampler patch plans, and knows the patcher; ComfyUI itself names the native model
        self.plan()
        return [] if self.fallback is None else [self.network.patcher]

    def open(self) -> None:
        """Open the engine while ComfyUI loads models for a run; where it cannot be opened native serves the run."""
        if self.session is None or self.fallback is not None:
            return
        try:
            self.session.load()
        except Unavailable as unavailable:
            self.give_up(unavailable.fallback)

    def give_up(self, fallback: Fallback) -> None:
        """Leave the rest of this run to native; ComfyUI makes no room for the engine any more."""
        self.fallback = fallback
        self.patcher.model.expected = False

    def begin_run(self, patcher: ModelPatcher | None = None) -> CallStats:
        """Called with every call; does its work in the first call of each execution of a sampling node.

        Args:
            patcher: the one that ComfyUI samples with, when it is not the network's own.
        """
        context = executing()
        if context is not self._context:
            with self._beginning:  # ComfyUI may call a network from several threads at once
                if context is not self._context:
                    self._begin_run(context, patcher)
        if self._watch.weights_edited():
            self.refresh()
        return self.stats

    def _begin_run(self, context: ExecutionContext | None, patcher: ModelPatcher | None) -> None:
        self.plan(patcher)
        network = self.network
        self.stats = open_stats(network.role.value, network.label, self.node_id, self.node_key, network.device)
        if self.session is not None and self.session.follows_patches:
            keep_beside(network.module, self.patcher)
        elif self.session is not None:
            keep(self.patcher, context.prompt_id if context else "")
        if self.session is not None:
            self.stats.remark = remark(network.module, patcher or network.patcher, network.prefix)
        self._context = context  # last: who sees it finds the run begun

    def serve(
        self, refusal: Fallback | None, call: Callable[[], EngineCall], patcher: ModelPatcher | None = None
    ) -> tuple[bool, Any]:
        """Run a call on the engine: (True, its result), or count it as native: (False, None).

        Args:
            refusal: why the caller does not want the engine for this call, if so.
            call: the call as the engine takes it; asked for only when an engine is there.
            patcher: the one that ComfyUI samples with, when it is not the network's own. One execution of a node may
                sample several, so it is followed in every call.
        """
        stats = self.begin_run(patcher)
        fallback = refusal or self.fallback or why_again() or self._watch.changed()
        if fallback is None:
            try:
                with timed(stats.times), self._range():
                    session = self.session
                    if not session.loaded:
                        stats.count_opening()
                    session.follow(self.network, patcher or self.network.patcher)
                    bound = call()
                    late = () if bound.late is None else (bound.late,)
                    result = bound.finish(session.run(bound.inputs, bound.extras, *late))
            except Unsupported as unsupported:
                other_kind = isinstance(unsupported, OtherKind)
                fallback = Fallback(Reason.OTHER_KIND if other_kind else Reason.UNSUPPORTED_INPUT, str(unsupported))
            except Unavailable as unavailable:
                fallback = unavailable.fallback
                failed = fallback.reason in (Reason.ENGINE_FAILED, Reason.BROKEN_ENGINE, Reason.WRONG_GPU)
                if failed and not fallback.others_serve:
                    self.give_up(fallback)
            else:
                stats.count_engine(session.backend_name, session.uncompiled, beside=bound.late is not None)
                if (why := session.plain) is not None:
                    stats.count_plain(why)
                if stats.engine_name != session.name:  # the first call of a run
                    last_use.mark(session.serving)
                stats.engine_name = session.name
                return True, result
        stats.count_native(fallback, self._wanted(fallback.sizes))
        return False, None

    def native(self, call: Callable[[], Any]) -> Any:
        """Make a call that ``serve`` left to native, timed with the others.

        Args:
            call: made a second time, with every engine closed, when memory lacks.
        """
        with timed(self.stats.times):
            try:
                return call()
            except torch.OutOfMemoryError:
                log.warning("Hybrid TRT: %s lacks memory on native, engines make room", self.network.label)
            # outside the handler: the error's frames hold what was allocated until then
            close_engines(self.network.device)
            return call()

    def status(self) -> str:
        """One sentence for the node."""
        if self.session is None:
            return f"{self.fallback.sentence()} {self.note}".strip()
        text = self.session.status(self.profile)
        if self.session.engines and self.refusal is None:
            text += self._not_compiled()
            if self.choice.replaceable and not self.takes_any_weights and not self.follows_patches:
                name = self.session.engines[0].manifest.identity.backend
                text += f". {name} has no engines with replaceable weights: this one is for these alone"
        its = remark(self.network.module, self.network.patcher, self.network.prefix)
        return ". ".join(filter(None, (text, its, self.note)))

    def _not_compiled(self) -> str:
        """What the graph or the last run asks for and no file is for, in words."""
        lacking = self.session.to_compile(self.choice.profile, self.asked)
        words = dict.fromkeys(self.network.architecture().call_words(call) for calls in lacking for call in calls)
        how = "as a CUDA graph" if self.network.device.type == "cuda" else "eagerly"
        return f". Not compiled for {'; '.join(words)}: runs {how}; build to add that" if words else ""
