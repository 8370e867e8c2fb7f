"""The backends: who builds engines and runs them, one module each.

A module in this folder that defines ``BACKEND`` is a backend: adding one is adding a file. Importing a backend's module
is cheap; what it drives (onnxruntime, tensorrt) is imported when first needed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard

from ..architectures.tensors import Profile, TensorSpec
from ..engine_library import Engine, Fallback, Manifest, Reason, Unavailable

if TYPE_CHECKING:
    import torch

    from ..engine_library.native import NativeNetwork

AUTO = "auto"
"""The choice of no backend in particular: the best one that runs here."""

Progress = Callable[[str, float], None]
"""Called with a phase in words and the fraction done, 0 to 1; may raise to cancel."""


class BuildError(Exception):
    """A build that cannot succeed; the text says what happened and what to do."""


@dataclass(frozen=True)
class BuildRequest:
    """A checked ONNX graph to be made an engine.

    Attributes:
        onnx: path of the graph; weights over 2 GB lie beside it.
        inputs, outputs: its tensors, in order.
        profile: shapes that the engine must accept.
        folder: where to put the engine's files; it already holds the graph.
        target: what the engine has to run on, in the words of the backend's ``target``.
    """

    onnx: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: Profile
    folder: Path
    target: str


class Runner(Protocol):
    """A loaded engine.

    Attributes:
        device: where inputs and outputs have to be.
        bytes: memory that it holds, estimated.
    """

    device: torch.device
    bytes: int

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Compute into ``outputs``. All tensors contiguous, on ``device``, with the dtypes and shapes of the engine."""
        ...


class Backend(Protocol):
    """What builds and runs engines.

    Attributes:
        name: stands in manifests and in the node's list; never change it.
        preference: of several backends that can serve, ``auto`` takes the highest.
        measured_on: kinds of devices, see ``kind_of``, on which its engines were run and held against native.
        builds_on_gpu: whether a build needs memory and time of the GPU that it is for.
        build_memory: main memory that ``build`` takes, in sizes of the weights (0 when it has none).
    """

    name: str
    preference: int
    measured_on: Collection[str]
    builds_on_gpu: bool
    build_memory: float = 0.0

    def version(self) -> str:
        """Version of the library that does the work, as it enters the engine's identity."""
        ...

    def target(self, device: torch.device) -> str:
        """What an engine built here would run on, as it enters the engine's identity."""
        ...

    def unavailable(self, device: torch.device) -> Fallback | None:
        """Why this backend cannot run on a device here, or None when it can."""
        ...

    def cannot_build(self, device: torch.device) -> Fallback | None:
        """Why no engine for a device can be built here, or None; it may be possible where running is not."""
        ...

    def refuses(self, manifest: Manifest, device: torch.device) -> Fallback | None:
        """Why this engine in particular cannot run on a device here (version, GPU), or None when it can."""
        ...

    def build(self, request: BuildRequest, progress: Progress) -> list[str]:
        """Make the engine's files in ``request.folder`` and return their names, the one to open first.

        Needs neither ComfyUI nor the model, so it may run in a process of its own. ``progress`` gets the fraction of
        this build, which never falls.

        Raises:
            BuildError: the engine cannot be built. What ``progress`` raises comes out as it is.
        """
        ...

    def load(self, engine: Engine, device: torch.device) -> Runner:
        """Open an engine for running on a device."""
        ...


class LiveBackend(Backend, Protocol):
    """A backend that runs a loaded native module and not a file of weights.

    Attributes:
        live: True.
    """

    live: bool

    def cannot_build(self, device: torch.device) -> Fallback | None:
        """Why nothing can be compiled for a device here, or None."""
        ...

    def layout(self, network: NativeNetwork) -> str:
        """What its engines have in their identity in the place of a hash of weights."""
        ...

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        """The sets of symbols that an engine has compiled files for."""
        ...

    def open_live(self, engine: Engine, symbols: dict[str, int]) -> Callable:
        """The compiled function for some symbols: weights, then inputs -> outputs."""
        ...


def is_live(backend: Backend) -> TypeGuard[LiveBackend]:
    """Whether a backend runs live modules."""
    return getattr(backend, "live", False)


def backends() -> dict[str, Backend]:
    """Every backend of this folder by name, the most preferred first."""
    found = []
    for entry in pkgutil.iter_modules(__path__):
        backend = getattr(importlib.import_module(f".{entry.name}", __name__), "BACKEND", None)
        if backend is not None:
            found.append(backend)
    return {b.name: b for b in sorted(found, key=lambda b: -b.preference)}


def kind_of(device: torch.device) -> str:
    """The kind of device that measurements hold for: ``"cpu"``, ``"cuda"`` (NVIDIA), ``"rocm"`` and so on."""
    import torch

    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def proven(backend: Backend, device: torch.device) -> bool:
    """Whether ``auto`` may take a backend: what nobody has run on such a device serves only when chosen by name."""
    return kind_of(device) in backend.measured_on


def _not_on_auto(every: Iterable[Backend], device: torch.device) -> list[Backend]:
    """Where nothing was measured: all backends when none of them runs there, so that each says why.

    Raises:
        Unavailable: some would run; names them.
    """
    able = [b.name for b in every if b.unavailable(device) is None]
    if able:
        where = f"no backend was measured on {kind_of(device)} yet, so 'auto' takes none"
        raise Unavailable(Reason.BACKEND_MISSING, f"{where}; choose {' or '.join(able)} by name to try it")
    return list(every)


def usable_backends(choice: str, device: torch.device) -> list[Backend]:
    """The backends that a choice allows and that can run on a device here, the most preferred first.

    Raises:
        Unavailable: none; says why not, of each that could be installed.
    """
    known = backends()
    if choice == AUTO:
        allowed = [b for b in known.values() if proven(b, device)] or _not_on_auto(known.values(), device)
    else:
        allowed = [known[choice]] if choice in known else []
    refusals = {b.name: b.unavailable(device) for b in allowed}
    usable = [b for b in allowed if refusals[b.name] is None]
    if not usable:
        reasons = [refusal.reason for refusal in refusals.values()]
        # what can be installed is worth more to the user than what can never run here
        reason = Reason.BACKEND_MISSING if Reason.BACKEND_MISSING in reasons or not reasons else reasons[0]
        details = [refusal.detail for refusal in refusals.values() if refusal.reason is reason]
        raise Unavailable(reason, "; ".join(details) or f"there is no backend called {choice}")
    return usable
