"""The backend of TensorRT 8.6, whose engines take one size each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ....architectures.calls import RequestedCalls
from ....architectures.shapes import Profile, Range
from ....engine_library import Engine, Fallback, Reason
from ....engine_library.gpu import Gpu
from ...file_backend import FileBackend
from ..backend import TensorRTBackend
from ..flavour import Flavour
from ..full import FullTensorRTBackend
from . import INSTALL
from .build import Version8Steps
from .runner import Version8Engine

if TYPE_CHECKING:
    from ....comfy_model.network import NativeNetwork
    from ....sessions.session import Session

OLDEST, NEWEST = (6, 0), (9, 0)
"""Compute capabilities that it supports."""

MOST_OPEN = 2
"""Engines that are open at once, and that are built for sizes which a run showed: each has all weights."""


class OneSizeBackend(FileBackend):
    """A backend whose engines take one size each, the best of their profile; a session uses all of a network."""

    def engine_profile(self, profile: Profile) -> Profile:
        return Profile({symbol: Range(size, size, size) for symbol, size in profile.sizes("opt").items()})

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        return [engine.manifest.identity.profile.sizes("opt")]

    def in_use(self, engines: Sequence[Engine]) -> list[Engine]:
        return [e for e in engines if e.manifest.identity.weights == engines[0].manifest.identity.weights]

    def profiles(self, network: NativeNetwork, calls: RequestedCalls) -> list[Profile]:
        """A profile for each picture, and for the sizes that most calls had."""
        architecture, usual = network.architecture(), calls.profile.sizes("opt")
        drawn = [Profile.around(architecture.calls(calls.profile, picture)) for picture in calls.pictures]
        seen = [Profile.around([usual | dict(call)]) for call in (calls.seen or ())[:MOST_OPEN]]
        found: list[Profile] = []
        for profile in map(self.engine_profile, [*(drawn or [calls.profile]), *seen]):
            if profile not in found:
                found.append(profile)
        return found

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> Session:
        from ....sessions.session import refusal_of
        from .session import one_size_session  # needs ComfyUI

        sound = [engine for engine in engines if refusal_of(engine) is None] or engines
        return one_size_session([self.session_of(engine, network) for engine in sound], MOST_OPEN)


class _Flavour(Flavour):
    """The package, which has one name for all versions of CUDA."""

    install = INSTALL


class Version8Backend(OneSizeBackend, FullTensorRTBackend):
    """Its engines take one size each, and no brain floats.

    With the usual 8 MB of stack a build of SD1.5's UNet with replaceable weights was ended by SIGSEGV, with these it
    was not (one build each, on H200s).
    """

    flavour = _Flavour("tensorrt", "TensorRT", ((8, 6), (8, 7)), "tensorrt")
    precisions = ("float16", "float32")
    build_stack = 512 << 20
    steps = Version8Steps()
    opened_engine = Version8Engine
    notice = ""

    def build_memory(self, weights: int) -> int:
        """Read off builds of 0.7, 1.7 and 5.1 GB of weights."""
        return int(max(5.9e9 + 3.4 * weights, 9 * weights - 4.3e9))

    def cannot_run(self, device: torch.device) -> Fallback | None:
        if (why := TensorRTBackend.cannot_run(self, device)) is not None:
            return why
        gpu = Gpu.of(device)
        if OLDEST <= gpu.capability <= NEWEST:
            return None
        detail = f"TensorRT {self.version()} is older than this GPU, {gpu}; {FullTensorRTBackend.flavour.install}"
        return Fallback(Reason.WRONG_GPU, detail)


BACKEND = Version8Backend()
