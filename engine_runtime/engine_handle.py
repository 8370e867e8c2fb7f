"""What an engine node hands on: which engine a network wants, looked up anew for every sampling run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..architectures.tensors import Profile
from ..backends import AUTO, is_live, usable_backends
from ..engine_library import Fallback, Library, Manifest, Reason, Unavailable, Wanted, last_use
from ..engine_library.native import NativeNetwork
from ..engine_library.plain_copy import ReplacedForward
from .hints import HintEncoder
from .ledger import Tally, executing, open_tally
from .live_session import LiveSession, live_session
from .memory import EnginePatcher, keep, keep_beside
from .room import close_engines
from .session import Session, session
from .timing import named_range, timed

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy_execution.utils import ExecutionContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineChoice:
    """The engine node's settings: for which shapes, how precise (``auto``: as native), by which backend (``auto``)."""

    profile: Profile
    precision: str = AUTO
    backend: str = AUTO


class EngineHandle:
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
        self.fallback: Fallback | None = None
        self.note = ""  # what the node says besides, for example that a build is under way
        self.tally: Tally | None = None
        self._encode_hint: HintEncoder | None = None
        # no execution context is this object: the first question begins a run
        self._context: object = self
        self._looked_up_in: object = self
        self._beginning = threading.Lock()
        self.refresh()

    @property
    def session(self) -> Session | LiveSession | None:
        """The engine that serves, or None when native does."""
        return self.patcher.model.session

    @session.setter
    def session(self, found: Session | LiveSession | None) -> None:
        self.patcher.model.session = found

    @property
    def precision(self) -> str:
        return self.network.precision if self.choice.precision == AUTO else self.choice.precision

    @property
    def follows_patches(self) -> bool:
        """Whether LoRAs and other weight patches need no engine of their own."""
        return isinstance(self.session, LiveSession)

    @property
    def refusal(self) -> str | None:
        """Why the engine that is there was not opened although the node serves without it, or None."""
        return self.session.refusal if isinstance(self.session, LiveSession) else None

    def of(self, network: NativeNetwork) -> EngineHandle:
        """The handle of the same node for another network of its kind."""
        return EngineHandle(network, self.choice, self.library, self.node_id, self.node_key)

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

    def _look_up(self) -> Session | LiveSession:
        architecture = self.network.architecture()
        device = self.network.device
        usable = {b.name: b for b in usable_backends(self.choice.backend, device)}

        def refuses(manifest: Manifest) -> Fallback | None:
            return usable[manifest.identity.backend].refuses(manifest, device)

        profile = self.choice.profile
        live = next((b for b in usable.values() if is_live(b)), None)
        weights = [live.layout(self.network)] if live else []
        # only engines that hold weights ask for a hash, and no whole checkpoint is hashed to learn that it has none
        if any(not is_live(backend) for backend in usable.values()):
            if self.library.may_have(architecture.name, self.network.fingerprint):
                weights.append(self.network.weights_hash())
            elif live is None:
                raise self.library.nothing_found()
        wanted = Wanted(architecture.name, weights, self.precision, profile, list(usable))
        passed_over = None
        try:
            engines = self.library.find_all(wanted, refuses)
        except Unavailable as unavailable:
            if live is None:
                raise
            engines = []  # it serves without one too
            passed_over = unavailable.fallback
        name = engines[0].manifest.identity.backend if engines else live.name
        if live is None or name != live.name:
            return session(engines[0], usable[name], device)
        found = live_session(self.network, live, self.precision)
        found.use([engine for engine in engines if engine.manifest.identity.backend == live.name], passed_over)
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
        if self.network.kind == "unet":
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

    def closed(self) -> None:
        """The engine has given its memory back."""
        if self._encode_hint is not None:
            self._encode_hint.release()

    def begin_run(self, patcher: ModelPatcher | None = None) -> Tally:
        """Called with every call; does its work in the first call of each execution of a sampling node.

        Args:
            patcher: the one that ComfyUI samples with, when it is not the network's own.
        """
        context = executing()
        with self._beginning:
            if context is not self._context or self.tally is None:
                self._begin_run(context, patcher)
        return self.tally

    def _begin_run(self, context: ExecutionContext | None, patcher: ModelPatcher | None) -> None:
        self._context = context
        self.plan(patcher)
        network = self.network
        self.tally = open_tally(network.kind, network.label, self.node_id, self.node_key, network.device)
        if isinstance(self.session, LiveSession):
            keep_beside(network.module, self.patcher)
        elif self.session is not None:
            keep(self.patcher, context.prompt_id if context else "")
        if self.session is not None:
            self._prepare_hints()

    def serve(
        self,
        refusal: Fallback | None,
        inputs: Callable[[], dict[str, torch.Tensor]],
        patcher: ModelPatcher | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """Run a call on the engine, or count it as native and return None.

        Args:
            refusal: why the caller does not want the engine for this call, if so.
            inputs: gives the tensors by name; called only when an engine is there.
            patcher: the one that ComfyUI samples with, when it is not the network's own. One execution of a node may
                sample several, so it is followed in every call.
        """
        tally = self.begin_run(patcher)
        fallback = refusal or self.fallback
        if fallback is None:
            try:
                with timed(tally.times), self._range():
                    self.session.follow(patcher or self.network.patcher)
                    given = inputs()
                    if self._encode_hint is not None:
                        given["hint"] = self._encode_hint(given["hint"])
                    outputs = self.session.run(given)
            except Unavailable as unavailable:
                fallback = unavailable.fallback
                if fallback.reason in (Reason.ENGINE_FAILED, Reason.BROKEN_ENGINE, Reason.WRONG_GPU):
                    self.give_up(fallback)
            else:
                tally.count_engine(self.session.backend.name)
                if tally.engine_name != self.session.name:  # the first call of a run
                    last_use.mark(self.session.engines)
                tally.engine_name = self.session.name
                return outputs
        tally.count_native(fallback)
        return None

    def native(self, call: Callable[[], Any]) -> Any:
        """Make a call that ``serve`` left to native, timed with the others.

        Args:
            call: made a second time, with every engine closed, when memory lacks.
        """
        with timed(self.tally.times):
            try:
                return call()
            except torch.OutOfMemoryError:
                log.warning("Hybrid TRT: %s lacks memory on native, engines make room", self.network.label)
            # outside the handler: the error's frames hold what was allocated until then
            close_engines(self.network.device)
            return call()

    def _range(self) -> AbstractContextManager[None]:
        """Names the engine's calls in NVIDIA's profilers."""
        if self.network.device.type != "cuda":
            return nullcontext()
        return named_range(f"Hybrid TRT {self.network.kind} {self.network.label}")

    def _prepare_hints(self) -> None:
        """A ControlNet's engine takes its hint encoded; a live session does that by itself."""
        if self.network.kind != "controlnet" or isinstance(self.session, LiveSession):
            self._encode_hint = None
            return
        try:
            if self._encode_hint is None:
                self._encode_hint = HintEncoder(self.network, self.precision)
        except ReplacedForward as error:
            self.session, self.fallback = None, Fallback(Reason.MODEL_PATCHED, str(error))

    def status(self) -> str:
        """One sentence for the node."""
        if self.session is None:
            return f"{self.fallback.sentence()} {self.note}".strip()
        if isinstance(self.session, LiveSession):
            return f"{self.session.status()} {self.note}".strip()
        manifest = self.session.engine.manifest
        text = f"{manifest.identity.backend} {manifest.identity.precision}, {self.session.profile}"
        text += f", {manifest.bytes / 1e6:.0f} MB"
        if not self.session.profile.contains(self.choice.profile.only(self.session.profile.ranges)):
            text += f". It is smaller than this node's profile ({self.choice.profile}): larger calls run native"
            text += f". {self.note}" if self.note else ""
        return text
