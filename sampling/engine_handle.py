"""Handle that an engine node returns: the engine of a network, looked up anew for every sampling run."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..architectures import Role
from ..architectures.calls import AsyncInputs, Binding, EngineCall, OtherKind, Unsupported
from ..backends.lookup import EngineChoice, Found, look_up, open_session
from ..comfy_model.attention import remark
from ..comfy_model.network import NativeNetwork, replaced_part
from ..comfy_model.weight_formats import remark_on_rounding
from ..comfy_model.weight_patches import WeightPatches, why_reshaped
from ..engine_library import Fallback, Library, Reason, Unavailable, inventory, measurements
from ..sessions.session import Active, Session
from . import NotCopied
from .call_stats import CallStats, CallTimes, open_stats, range_of, timed
from .engine_patcher import ControlEnginePatcher, EnginePatcher, keep, keep_with_module
from .nan_guard import why_again
from .native_network import NetworkWatch
from .run_context import executing

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher
    from comfy_execution.utils import ExecutionContext

    from .streamed_choice import TimedRun

log = logging.getLogger(__name__)

Run = Callable[
    [Mapping[str, "torch.Tensor"], Mapping[str, Hashable] | None, AsyncInputs | None], dict[str, "torch.Tensor"]
]
"""See ``Session.run``."""

_one_at_a_time = threading.RLock()
"""Held while a call is given to an engine: ComfyUI calls from several threads where it shares a step among GPUs. Some
settings are then for the whole process, such as torch's choice of an attention. The GPUs themselves run at once."""


class EngineHandle(NotCopied):
    """Stands for "the engine of this network" until a call needs it.

    The library is asked again at the start of every run. Methods take ComfyUI's patcher, by default the network's own.

    Attributes:
        patcher: by which ComfyUI's memory management sees the engine.
        bind: turns arguments into an engine's call; set together with a session.
        found: the last look-up's result; without a backend and a builder where the network can have no engine.
        fallback: why native serves, or None.
        note: another sentence for the node, for example that a build is under way.
        encodes_prompts: True if a part of the network runs once per prompt; for backbones.
        timed_run: takes the stats of the next run, whose calls are timed; None where nobody asks.
    """

    def __init__(
        self, network: NativeNetwork, choice: EngineChoice, library: Library, node_id: str, node_key: str = ""
    ):
        self.network = network
        self.choice = choice
        self.library = library
        self.node_id = node_id
        self.node_key = node_key
        kind = ControlEnginePatcher if network.role is Role.CONTROLNET else EnginePatcher
        self.patcher = kind.on(network.device, self)
        self.bind: Binding | None = None
        self.encodes_prompts = False
        self.found = Found(None)
        self.fallback: Fallback | None = None
        self.note = ""
        self.stats: CallStats | None = None
        self.timed_run: TimedRun | None = None
        self._served: CallStats | None = None  # stats of the last run that its engine served
        self._context = self._looked_up_in = self  # no execution context: the first call begins a run
        self._beginning = threading.Lock()
        self._range = range_of(network)
        self._watch = NetworkWatch(network)
        self._weight_patches = WeightPatches(network.patcher)

    @staticmethod
    def look_up(
        network: NativeNetwork, choice: EngineChoice, library: Library, node_id: str, node_key: str = "",
        known: Fallback | None = None,
    ) -> EngineHandle:  # fmt: skip
        """Return a handle whose engine has been looked up.

        Args:
            known: why the node had no engine before; see ``refresh``.
        """
        handle = EngineHandle(network, choice, library, node_id, node_key)
        handle.fallback = known
        network.undo_foreign_patches()
        handle.refresh()
        return handle

    def like(self, network: NativeNetwork) -> EngineHandle:
        """Return a handle of the same node for another network of this kind; the result of its build stays known."""
        return EngineHandle.look_up(network, self.choice, self.library, self.node_id, self.node_key, self.fallback)

    @property
    def session(self) -> Session | None:
        """Return the open engine, or None when there is none."""
        return self.patcher.model.session

    @property
    def follows_patches(self) -> bool:
        """True if LoRAs and other weight patches need no engine of their own."""
        return self.session is not None and self.session.follows_patches

    def refresh(self) -> None:
        """Look the engine up in the library: afterwards either ``session`` or ``fallback`` is set.

        The result of the node's build is a better reason than a missing engine.
        """
        session = None
        try:
            session, fallback = self._look_up(), None
        except Unavailable as unavailable:
            fallback = unavailable.fallback
        except OSError as error:
            fallback = Fallback(Reason.NO_ENGINE, f"the library cannot be read ({error})")
        except Exception as error:  # an unknown model may raise anything; native can sample it
            log.exception("Hybrid TRT: no engine could be looked up for %s", self.network.label)
            failure = f"looking the engine up failed ({type(error).__name__}: {error})"
            fallback = Fallback(Reason.ENGINE_FAILED, failure)
        self.patcher.model.session = session
        built = self.fallback is not None and self.fallback.reason in (Reason.BUILD_FAILED, Reason.BUILT_ELSEWHERE)
        if not built or fallback is None or fallback.reason is not Reason.NO_ENGINE:
            self.fallback = fallback

    def _look_up(self) -> Session:
        network, self.found = self.network, Found(None)
        if network.role is Role.BACKBONE:  # a VAE's clone may be loaded just to be called now
            network.undo_foreign_patches()
        try:
            architecture = network.unchanged_architecture(self._watch.layers)
        finally:
            self._watch.begin()
        self.bind = architecture.binding(network.module)
        kinds = (architecture.inputs, architecture.engine_inputs)
        native, own = (specs(network.module, network.precision) for specs in kinds)
        self.encodes_prompts = native != own
        self.found = look_up(network, self.choice, self.library)
        return open_session(self.found, network, self.choice.precision_for(network))

    def plan(self, patcher: ModelPatcher | None = None) -> None:
        """Look the engine up before ComfyUI plans memory for a run: once per execution of a sampling node."""
        context = executing()
        if context is not self._looked_up_in:
            self._looked_up_in = context
            self.refresh()
            self.patcher.model.expected = self.fallback is None
        if self.session is not None:
            self.session.begin_run(patcher or self.network.patcher)

    def models_beside(self, patcher: ModelPatcher | None = None) -> list[ModelPatcher]:
        """Return the models to load besides the engine: native weights of a ControlNet that needs them."""
        if self.network.role is Role.BACKBONE:
            return []  # its sampler patch plans, and knows the patcher; ComfyUI itself names the native model
        self.network.undo_foreign_patches()
        self.plan(patcher)
        if self.network.role is not Role.CONTROLNET:
            return []  # a VAE's native weights are loaded in any case: they are small
        patcher = patcher or self.network.patcher
        serves = self.fallback is None and self.why_not_patched_so(patcher) is None
        self.patcher.model.expected = serves
        return [] if serves else [patcher]

    def open(self, most: float = math.inf) -> None:
        """Open the engine while ComfyUI loads models for a run; where it cannot be opened native serves the run.

        Args:
            most: bytes that its weights may take, where some can be streamed.
        """
        if self.session is None or self.fallback is not None:
            return
        try:
            self.session.load(most)
        except Unavailable as unavailable:
            self.give_up(unavailable.fallback)

    def give_up(self, fallback: Fallback) -> None:
        """Leave the rest of this run to native; ComfyUI makes no room for the engine any more."""
        self.fallback = fallback
        self.patcher.model.expected = False

    def begin_run(self, patcher: ModelPatcher | None = None) -> CallStats:
        """Begin a run in the first call of each execution of a sampling node, and return its stats."""
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
        if self.timed_run is not None:
            self.timed_run.stats, self.timed_run = self.stats, None
            self.stats.times = self.stats.times or CallTimes(network.device)
        if self.session is not None:
            if self.session.follows_patches:
                keep_with_module(network.module, network.role, self.patcher)
            else:
                keep(self.patcher, context.prompt_id if context else "")
            whose, called = patcher or network.patcher, self.session.calls_attention
            its = remark(network.parts[0].module, whose, network.prefix, called), remark_on_rounding(whose)
            self.stats.remark = ". ".join(filter(None, (*its, self.session.remark)))
        self._context = context  # last: other threads that see it find the run begun

    def why_not_patched_so(
        self, patcher: ModelPatcher, weight_patches: WeightPatches | None = None
    ) -> Fallback | None:
        """Return the reason why the engine is not valid for a model with a patcher's patches, or None. Cheap.

        Args:
            weight_patches: the engine's patches, by default the network's when the node ran.
        """
        network = self.network
        if patcher.hook_patches or patcher.current_hooks or patcher.forced_hooks:
            return Fallback(Reason.HOOKS, "a prompt or the model brings a LoRA or checkpoint of its own (hooks)")
        if (what := replaced_part(patcher, network.prefix)) is not None:
            return Fallback(Reason.MODEL_PATCHED, what)
        if (fallback := network.other_dtype(patcher) or why_reshaped(patcher)) is not None:
            return fallback
        if self.follows_patches:
            if patcher.weight_wrapper_patches:
                return Fallback(Reason.MODEL_PATCHED, "another node wraps the weights")
            if patcher.model is not network.patcher.model:
                return Fallback(Reason.OTHER_MODEL, f"it computes with the weights of {network.label}")
        elif (fallback := (weight_patches or self._weight_patches).difference_on(patcher)) is not None:
            return fallback
        if patcher.injections:
            return Fallback(Reason.MODEL_PATCHED, "another node has put parts into the model")
        return None

    def why_native_now(self) -> Fallback | None:
        """Return why native has to serve the next call of this run, whatever its inputs, or None."""
        return self.fallback or why_again() or self._watch.changed()

    def serve(
        self,
        refusal: Fallback | None,
        call: Callable[[], EngineCall],
        patcher: ModelPatcher | None = None,
        stats: CallStats | None = None,
        run: Run | None = None,
    ) -> tuple[bool, Any]:
        """Run a call on the engine: (True, its result), or count it as native: (False, None).

        Args:
            refusal: why the caller does not want the engine for this call, if so.
            call: makes the engine's call; used only when an engine is there.
            patcher: the patcher that ComfyUI samples with. One execution of a node may sample several.
            stats: the result of ``begin_run`` for a caller whose refusal depends on the engine.
            run: runs the engine's call; by default its session does.
        """
        stats = stats or self.begin_run(patcher)
        fallback = refusal or self.why_native_now()
        if fallback is None:
            try:
                with _one_at_a_time, timed(stats.times), self._range():
                    session = self.session
                    if not session.loaded and self._served is stats:
                        stats.count_opening()
                    bound = call()  # first: other models that it runs may take the session's memory
                    session.sync_from(self.network, patcher or self.network.patcher)
                    result = bound.finish((run or session.run)(bound.inputs, bound.extras, bound.late))
            except (Unsupported, Unavailable) as error:
                fallback = _as_fallback(error)
                if fallback.reason.ends_run and not fallback.this_call_only:
                    self.give_up(fallback)
            else:
                self._served = stats
                _note(ServedCall(self, stats, session, session.active, patcher, bound.late is not None))
                return True, result
        _note(None)
        stats.count_native(fallback, self.choice.asked_for(fallback.uncovered, self.network))
        return False, None


@dataclass(frozen=True)
class ServedCall:
    """A call that an engine served.

    Attributes:
        session: the handle's session; ``served`` is the part of it that served.
        patcher: the patcher that ComfyUI sampled with, or None for the network's own.
        beside: True if it started beside ControlNets and waited for them on the way.
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
        name = served.name
        if stats.engine_name != name:  # the first call of a run
            inventory.mark_used(served.serving)
            stats.proof = measurements.call_times(served.serving)
            stats.engine_name = name

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


def _note(call: ServedCall | None) -> None:
    """List a call where calls are listed, None for native's; otherwise count an engine's call."""
    listed = _listed.get()
    if listed is not None:
        listed.append(call)
    elif call is not None:
        call.count()


def _as_fallback(error: Unavailable | Unsupported) -> Fallback:
    if isinstance(error, Unavailable):
        return error.fallback
    return Fallback(Reason.OTHER_KIND if isinstance(error, OtherKind) else Reason.UNSUPPORTED_INPUT, str(error))
