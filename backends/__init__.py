"""The backends: who builds engines and runs them, one module or folder each. ``lookup`` decides which one serves.

A module in this folder that defines ``BACKENDS`` has backends: adding one is adding a file. Importing it is cheap; what
it drives (onnxruntime, tensorrt) is imported when first needed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures.calls import Call, RequestedCalls
from ..architectures.shapes import PRECISIONS, Profile, Range, TensorSpec
from ..engine_library import Engine, Fallback, Manifest, Reason

if TYPE_CHECKING:
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    import torch

    from ..comfy_model.network import NativeNetwork
    from ..sessions.session import Session

AUTO = "auto"
"""The choice of no backend in particular: of the engines that proved themselves here the fastest one."""

Progress = Callable[[str, float], None]
"""Called with a phase in words and the fraction done, 0 to 1; may raise to cancel."""

Submit = Callable[..., "Future[Any]"]
"""Called with a function and its arguments, which another process then calls; all of that has to be picklable."""


@dataclass(frozen=True)
class BuildRequest:
    """A checked ONNX graph to be made an engine.

    Attributes:
        onnx: path of the graph; weights over 2 GB lie beside it.
        inputs, outputs: its tensors, in order.
        profile: shapes that the engine must accept.
        folder: where to put the engine's files; it already holds the graph.
        target: what the engine has to run on, in the words of the backend's ``target``.
        any_weights: the engine has to take other weights of the same layout afterwards, see ``Runner.refit``.
        options: the backend's own, see ``FileBackend.options``.
    """

    onnx: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: Profile
    folder: Path
    target: str
    any_weights: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveTask:
    """A network to be compiled on its device.

    Attributes:
        inputs, outputs: its tensors, in order.
        precision: what it computes in, torch's name.
        free: the sizes to compile for, see ``Architecture``.
        folder: where to put the engine's files.
        known: contents of files of engines that are there; see ``LiveCompiler.known``.
        calls_attention: whether blocks call attention as an operation, see ``user_attention``.
        most_helpers: how many processes may compile beside this one; 0 where this one does all.
        helpers: starts so many, for the time of a block.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    device: torch.device
    folder: Path
    free: Mapping[str, Range]
    known: Sequence[bytes] = ()
    calls_attention: bool = False
    most_helpers: int = 0
    helpers: Callable[[int], AbstractContextManager[Submit]] | None = None


@dataclass(frozen=True)
class BuildSizes:
    """One engine to be built.

    Attributes:
        calls: what a run or the graph has shown that no live weights' engine serves; none: all of the profile.
        again: True if an engine that is there is built again.
    """

    profile: Profile
    calls: tuple[Call, ...] = ()
    again: bool = False


class Backend(ABC):
    """A way to run engines. Each one also builds: it is a ``FileBackend`` or, with ``runs_live_weights``, a
    ``LiveCompiler``.

    Attributes:
        name: stands in manifests and in the node's list; never change it.
        preference: of several backends that can serve, ``auto`` takes the highest where no figures tell more.
        measured_on: kinds of devices (see ``gpu.kind_of``) on which its engines were compared with native; elsewhere
            ``auto`` takes only engines of it that were timed on the very GPU.
        builds_on_gpu: True if a build needs memory and time of the GPU that it is for.
        runs_live_weights: True if its engines hold no weights: it then serves without an engine too.
        refits: True if it can build engines that take other weights afterwards; see ``BuildRequest.any_weights``.
        precisions: what its engines can compute in, torch's names.
        notice: how little is known of its engines, for the node, or ``""``.
    """

    name: str
    preference: int
    measured_on: Collection[str]
    builds_on_gpu: bool
    runs_live_weights = False
    refits = False
    precisions: Collection[str] = PRECISIONS
    notice = ""

    @abstractmethod
    def version(self) -> str:
        """Version of the library that does the work, as it enters the engine's identity."""

    @abstractmethod
    def target(self, device: torch.device) -> str:
        """Return what an engine built here runs on, as it enters the engine's identity."""

    def cannot_import(self) -> Fallback | None:
        """Return which package is missing or cannot be loaded, whatever the device, or None."""
        return None

    def get_ready(self) -> None:  # noqa: B027 - most backends have nothing to import
        """Begin to import what opening an engine takes, beside ComfyUI's loading of models; returns at once."""

    @abstractmethod
    def cannot_run(self, device: torch.device) -> Fallback | None:
        """Return why this backend cannot run on a device here, or None when it can."""

    def cannot_build(self, device: torch.device) -> Fallback | None:
        """Return why no engine for a device can be built here, or None; it may be possible where running is not."""
        return self.cannot_import()

    def cannot_use(self, manifest: Manifest, device: torch.device) -> Fallback | None:
        """Return why this engine in particular cannot run on a device here (version, GPU), or None when it can."""
        return self.cannot_run(device)

    def build_memory(self, weights: int) -> int:
        """Bytes of main memory that a build takes for so many bytes of weights, the graph's own not counted."""
        return 0

    @abstractmethod
    def writes(self, name: str) -> bool:
        """Tell whether builds make files of this name. Files of other names are never opened."""

    @abstractmethod
    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        """Return what stands for a network's weights in the identity of its engines: a hash of them, or of the
        structure where the engines take any weights.

        Args:
            check: called often during long work; may raise to stop it.
        """

    def engine_profile(self, profile: Profile) -> Profile:
        """The shapes that an engine takes which is built for a profile."""
        return profile

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        """The only calls that an engine takes, symbol -> size; an empty list if it takes all of its profile."""
        return []

    @abstractmethod
    def in_use(self, engines: Sequence[Engine]) -> list[Engine]:
        """The engines of a network that a session uses, the best first."""

    @abstractmethod
    def to_build(
        self, network: NativeNetwork, calls: RequestedCalls, engines: Sequence[Engine], rebuild: Collection[Engine] = ()
    ) -> list[BuildSizes]:
        """List what to build so that engines serve all calls that are requested.

        Args:
            engines: the engines in use.
            rebuild: engines in use that shall be built again.
        """

    @abstractmethod
    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> Session:
        """Open what serves a network's calls; there may be no engine where live weights run.

        Args:
            engines: as ``in_use`` gives them.
            passed_over: why an engine that is there is none of these.

        Raises:
            Unavailable: another node replaced a part of the network.
        """


class LiveCompiler(Backend):
    """A backend that compiles live networks; its engines hold no weights."""

    runs_live_weights = True

    @abstractmethod
    def compile(self, function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
        """Compile a network in blocks and return ``files``, ``parity`` and ``seconds`` of the manifest.

        What it times on the device has to be timed while the other processes have nothing to do.

        Args:
            function: the network as a function of its inputs, on the meta device.

        Raises:
            BuildError: as ``FileBackend.build``.
        """

    @abstractmethod
    def known(self, engines: Sequence[Engine], device: torch.device) -> list[bytes]:
        """Return the contents of engines' files for a device; a build takes the parts that fit its network."""


def backends() -> dict[str, Backend]:
    """Every backend of this folder by name, the most preferred first."""
    return {backend.name: backend for backend in _found(tuple(__path__))}


@functools.cache
def _found(folders: tuple[str, ...]) -> list[Backend]:
    """Read the folder once: this is called several times per prompt."""
    found: list[Backend] = []
    for entry in pkgutil.iter_modules(folders):
        found += getattr(importlib.import_module(f".{entry.name}", __name__), "BACKENDS", ())
    return sorted(found, key=lambda backend: -backend.preference)


def cannot_open(backend: Backend, manifest: Manifest, device: torch.device) -> Fallback | None:
    """Return why an engine cannot run on a device here, or None: it has files that its backend never writes, or the
    backend refuses it."""
    strange = next((name for name in manifest.files if not backend.writes(name)), None)
    if strange is not None:
        return Fallback(Reason.BROKEN_ENGINE, f"it has a file {strange}, and {backend.name} writes none of that name")
    return backend.cannot_use(manifest, device)
