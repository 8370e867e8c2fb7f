"""What an engine node hands on: which engine a network wants, looked up anew for every sampling run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..architectures.tensors import Profile
from ..backends import Backend, backends
from ..engine_library import Fallback, Library, Manifest, Reason, Unavailable, Wanted
from ..engine_library.native import NativeNetwork
from .ledger import Tally, executing, open_tally
from .session import Session, keep, session

AUTO = "auto"


@dataclass(frozen=True)
class EngineChoice:
    """The engine node's settings: for which shapes, how precise (``auto``: as native), by which backend (``auto``)."""

    profile: Profile
    precision: str = AUTO
    backend: str = AUTO


def usable_backends(choice: str, device: torch.device) -> list[Backend]:
    """The backends that a choice allows and that can run on a device here, the most preferred first.

    Raises:
        Unavailable: none; says why not, of each that could be installed.
    """
    known = backends()
    allowed = list(known.values()) if choice == AUTO else [known[choice]] if choice in known else []
    refusals = {b.name: b.unavailable(device) for b in allowed}
    usable = [b for b in allowed if refusals[b.name] is None]
    if not usable:
        reasons = [refusal.reason for refusal in refusals.values()]
        # what can be installed is worth more to the user than what can never run here
        reason = Reason.BACKEND_MISSING if Reason.BACKEND_MISSING in reasons or not reasons else reasons[0]
        details = [refusal.detail for refusal in refusals.values() if refusal.reason is reason]
        raise Unavailable(reason, "; ".join(details) or f"there is no backend called {choice}")
    return usable


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
        self.session: Session | None = None
        self.fallback: Fallback | None = None
        self.note = ""  # what the node says besides, for example that a build is under way
        self.tally: Tally | None = None
        self._context: object = self  # no execution context is this object: the first call begins a run
        self.refresh()

    @property
    def precision(self) -> str:
        return self.network.precision if self.choice.precision == AUTO else self.choice.precision

    def refresh(self) -> None:
        """Look the engine up in the library: afterwards either ``session`` or ``fallback`` is set."""
        try:
            self.session, self.fallback = self._look_up(), None
        except Unavailable as refusal:
            self.session, self.fallback = None, refusal.fallback

    def _look_up(self) -> Session:
        architecture = self.network.architecture()
        device = self.network.device
        usable = {b.name: b for b in usable_backends(self.choice.backend, device)}

        def refuses(manifest: Manifest) -> Fallback | None:
            return usable[manifest.identity.backend].refuses(manifest, device)

        if not self.library.may_have(architecture.name, self.network.fingerprint):
            raise self.library.nothing_found()  # without hashing a whole checkpoint to learn it
        profile = self.choice.profile
        wanted = Wanted(architecture.name, self.network.weights_hash(), self.precision, profile, list(usable))
        engine = self.library.find(wanted, refuses)
        return session(engine, usable[engine.manifest.identity.backend], device)

    def begin_run(self) -> Tally:
        """Called with every call; does its work in the first call of each execution of a sampling node."""
        context = executing()
        if context is not self._context or self.tally is None:
            self._context = context
            self.refresh()
            self.tally = open_tally(self.network.kind, self.network.label, self.node_id, self.node_key)
            if self.session is not None:
                keep(self.session, context.prompt_id if context else "")
        return self.tally

    def serve(
        self,
        refusal: Fallback | None,
        inputs: Callable[[], Mapping[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor] | None:
        """Run a call on the engine, or count it as native and return None.

        Args:
            refusal: why the caller does not want the engine for this call, if so.
            inputs: gives the tensors by name; called only when an engine is there.
        """
        tally = self.begin_run()
        fallback = refusal or self.fallback
        if fallback is None:
            try:
                outputs = self.session.run(inputs())
            except Unavailable as unavailable:
                fallback = unavailable.fallback
                if fallback.reason in (Reason.ENGINE_FAILED, Reason.BROKEN_ENGINE, Reason.WRONG_GPU):
                    self.fallback = fallback  # not again in this run
            else:
                tally.count_engine(self.session.backend.name)
                tally.engine_name = self.session.engine.folder.name
                return outputs
        tally.count_native(fallback)
        return None

    def status(self) -> str:
        """One sentence for the node."""
        if self.session is None:
            return f"{self.fallback.sentence()} {self.note}".strip()
        manifest = self.session.engine.manifest
        text = f"{manifest.identity.backend} {manifest.identity.precision}, {self.session.profile}"
        text += f", {manifest.bytes / 1e6:.0f} MB"
        if not self.session.profile.contains(self.choice.profile.only(self.session.profile.ranges)):
            text += f". It is smaller than this node's profile ({self.choice.profile}): larger calls run native"
            text += f". {self.note}" if self.note else ""
        return text
