"""Base of backends whose engines are files with the weights in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..architectures.calls import RequestedCalls
from ..architectures.shapes import Profile
from ..engine_library import Engine, Fallback
from . import Backend, BuildRequest, BuildSizes, Progress

if TYPE_CHECKING:
    import torch

    from ..comfy_model.network import NativeNetwork
    from ..engine_library.disk import Settings
    from ..sessions.file_session import FileSession
    from ..sessions.session import Runner, Session


class FileBackend(Backend):
    """Base of such backends. They build from ONNX graphs, without ComfyUI and the model.

    Attributes:
        file_names: names of the files that builds make.
        keeps_weights: True if an engine that takes any weights opens with the weights it was built with.
        build_stack: bytes of stack that a thread of ``build`` may need; 0 for what the system gives.
    """

    file_names: Collection[str]
    keeps_weights = False
    build_stack = 0

    def options(self, settings: Settings) -> dict[str, Any]:
        """Return what a build needs of the user's settings, as JSON; it comes as ``BuildRequest.options``."""
        return {}

    @abstractmethod
    def build(self, request: BuildRequest, progress: Progress) -> list[str]:
        """Make the engine's files in ``request.folder`` and return their names, the one to open first.

        ``progress`` gets the fraction of this build, which never falls; what it raises comes out as it is.

        Raises:
            BuildError: the engine cannot be built.
        """

    def writes(self, name: str) -> bool:
        return name in self.file_names

    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        return network.weights_hash(check)

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

    @abstractmethod
    def load(self, engine: Engine, device: torch.device) -> Runner:
        """Open an engine for running on a device.

        Raises:
            Unavailable: it cannot be opened here.
        """

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> Session:
        return self.session_of(engines[0], network)

    def session_of(self, engine: Engine, network: NativeNetwork) -> FileSession:
        """The session of one engine."""
        from ..sessions.file_session import file_session  # needs ComfyUI

        def load(engine: Engine, device: torch.device) -> Runner:
            return self.load(engine, device)

        return file_session(engine, load, network.device, network, self.keeps_weights)


def _hold(engines: Collection[Engine], profile: Profile) -> bool:
    own = [engine.manifest.identity.profile for engine in engines]
    return any(its.contains(profile.only(its.ranges)) for its in own)  # a UNet's has no sizes of hints
