"""Base of backends whose engines are files with the weights in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..architectures.calls import RequestedCalls
from ..architectures.shapes import PRECISIONS, Profile
from ..engine_library import Engine, Fallback, Manifest
from . import BuildSizes

if TYPE_CHECKING:
    import torch

    from ..comfy_model.network import NativeNetwork
    from ..engine_library.disk import Settings
    from ..sessions.file_session import FileSession
    from ..sessions.session import Runner, Session


class FileBackend:
    """Base of such backends. They define ``load`` and ``cannot_run``; sessions are the same for all.

    Attributes:
        file_names: those of the files that builds make.
        keeps_weights: True if an engine that takes any weights has those it was built with when it is opened.
    """

    file_names: Collection[str]
    build_stack = 0
    runs_live_weights = False
    refits = False
    keeps_weights = False
    precisions: Collection[str] = PRECISIONS
    notice = ""

    def cannot_import(self) -> Fallback | None:
        return None

    def cannot_build(self, device: torch.device) -> Fallback | None:
        return self.cannot_import()

    def cannot_run(self, device: torch.device) -> Fallback | None:
        raise NotImplementedError

    def cannot_use(self, manifest: Manifest, device: torch.device) -> Fallback | None:
        return self.cannot_run(device)

    def options(self, settings: Settings) -> dict[str, Any]:
        return {}

    def build_memory(self, weights: int) -> int:
        return 0

    def writes(self, name: str) -> bool:
        return name in self.file_names

    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        return network.weights_hash(check)

    def engine_profile(self, profile: Profile) -> Profile:
        return profile

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        return []

    def in_use(self, engines: Sequence[Engine]) -> list[Engine]:
        return list(engines[:1])

    def to_build(
        self, network: NativeNetwork, calls: RequestedCalls, engines: Sequence[Engine], rebuild: Collection[Engine] = ()
    ) -> list[BuildSizes]:
        return [
            BuildSizes(profile, again=_hold(rebuild, profile))
            for profile in self.profiles(network, calls)
            if _hold(rebuild, profile) or not _hold(engines, profile)
        ]

    def profiles(self, network: NativeNetwork, calls: RequestedCalls) -> list[Profile]:
        """The shapes to have engines for."""
        return [calls.profile]

    def load(self, engine: Engine, device: torch.device) -> Runner:
        """Open an engine for running on a device.

        Raises:
            Unavailable: it cannot be opened here.
        """
        raise NotImplementedError

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> Session:
        return self.opened(network, engines)[0]

    def opened(self, network: NativeNetwork, engines: Sequence[Engine]) -> list[FileSession]:
        """Sessions of those engines that are not broken, or of all."""
        from ..sessions.file_session import file_session  # needs ComfyUI
        from ..sessions.session import refusal_of

        sound = [engine for engine in engines if refusal_of(engine) is None] or engines
        return [file_session(engine, self.load, network.device, network, self.keeps_weights) for engine in sound]


def _hold(engines: Collection[Engine], profile: Profile) -> bool:
    own = [engine.manifest.identity.profile for engine in engines]
    return any(its.contains(profile.only(its.ranges)) for its in own)  # a UNet's has no sizes of hints
