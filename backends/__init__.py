"""The backends: who builds engines and runs them, one module or folder each.

A module in this folder that defines ``BACKENDS`` has backends: adding one is adding a file. Importing it is cheap; what
it drives (onnxruntime, tensorrt) is imported when first needed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..architectures.shapes import Profile, TensorSpec
from ..engine_library import Engine, EngineQuery, Fallback, Library, Manifest, Reason, Unavailable, trust
from .gpu_lock import GpuLock

if TYPE_CHECKING:
    import torch

    from ..comfy_model.network import NativeNetwork
    from ..sessions.session import Session

AUTO = "auto"
"""The choice of no backend in particular: of the engines that proved themselves here the fastest one."""

Progress = Callable[[str, float], None]
"""Called with a phase in words and the fraction done, 0 to 1; may raise to cancel."""


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
        level: how hard to search for fast kernels, 1 to 5, where the backend can be told; 0 leaves it to the backend.
    """

    onnx: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: Profile
    folder: Path
    target: str
    any_weights: bool = False
    level: int = 0


@dataclass(frozen=True)
class LiveTask:
    """A network to be compiled on its device.

    Attributes:
        inputs, outputs: its tensors, in order.
        sizes: the calls to compile for, symbol -> size.
        precision: what it computes in, torch's name.
        folder: where to put the engine's files.
        turns: what other processes compile the order's other sizes for the same device meanwhile.
        part: which of how many parts of its only size this process compiles; the first one puts them together. For
            the others a function's parameters are on the meta device.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: Sequence[dict[str, int]]
    precision: str
    device: torch.device
    folder: Path
    turns: GpuLock = GpuLock()
    part: tuple[int, int] = (0, 1)

    @property
    def leads(self) -> bool:
        """Whether this process puts the parts together and compares; any other one needs no values of weights."""
        return self.part[0] == 0


class Backend(Protocol):
    """What builds and runs engines.

    Attributes:
        name: stands in manifests and in the node's list; never change it.
        preference: of several backends that can serve, ``auto`` takes the highest where no figures tell more.
        measured_on: kinds of devices, see ``kind_of``, on which its engines were run and held against native; elsewhere
            ``auto`` takes only engines of it that were timed on the very GPU.
        builds_on_gpu: whether a build needs memory and time of the GPU that it is for.
        build_stack: bytes of stack that a thread of ``build`` may need; 0 for what the system gives.
        runs_live_weights: whether its engines hold no weights: it then serves without an engine too, and builds from
            the network itself and not from an ONNX graph.
        refits: whether it can build engines that take other weights afterwards; see ``BuildRequest.any_weights``.
        keeps_weights: whether such an engine has the weights that it was built with when it is opened.
        one_size: whether an engine of it is for one size, of a profile the best one.
        in_parts: whether several processes may compile a size together, each a part of it; see ``LiveTask``.
        precisions: what its engines can compute in, torch's names.
    """

    name: str
    preference: int
    measured_on: Collection[str]
    builds_on_gpu: bool
    build_stack: int
    runs_live_weights: bool
    refits: bool
    keeps_weights: bool
    one_size: bool
    in_parts: bool
    precisions: Collection[str]

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

    def build_memory(self, weights: int) -> int:
        """Bytes of main memory that ``build`` takes for so many bytes of weights, the graph's own apart."""
        ...

    def weights(self, network: NativeNetwork, check: Callable[[], None] | None = None) -> str:
        """What stands for a network's weights in the identity of its engines: their hash, or a layout that serves any.

        Args:
            check: called often during long work; may raise to stop it.
        """
        ...

    def build(self, request: BuildRequest, progress: Progress) -> list[str]:
        """Make the engine's files in ``request.folder`` and return their names, the one to open first.

        Needs neither ComfyUI nor the model, so it may run in a process of its own. ``progress`` gets the fraction of
        this build, which never falls.

        Raises:
            BuildError: the engine cannot be built. What ``progress`` raises comes out as it is.
        """
        ...

    def compile(self, function: torch.nn.Module, task: LiveTask, progress: Progress) -> dict:
        """The build of a backend that runs live weights: ``files``, ``parity`` and ``seconds`` of the manifest.

        There is one file and one of the parity's ``cases`` for each size, in the task's order. Sizes of one order may
        be compiled by several processes at once: what is timed on the device has to be in a turn (``task.turns``). One
        that compiles a part and is not the first has none of these, but for its ``seconds``.

        Args:
            function: the network as a function of its inputs, on the task's device.

        Raises:
            BuildError: as ``build``.
        """
        ...

    def sizes(self, engine: Engine) -> list[dict[str, int]]:
        """The calls that an engine has compiled files for, symbol -> size; none of one that serves a whole profile."""
        ...

    def session(
        self, network: NativeNetwork, engines: Sequence[Engine], precision: str, passed_over: Fallback | None
    ) -> Session:
        """What serves a network's calls by its engines, the best first; there may be none where live weights are run.

        Args:
            passed_over: why an engine that is there is none of these.

        Raises:
            Unavailable: another node replaced a part of the network.
        """
        ...


def backends() -> dict[str, Backend]:
    """Every backend of this folder by name, the most preferred first."""
    return {backend.name: backend for backend in _found(tuple(__path__))}


@functools.cache
def _found(folders: tuple[str, ...]) -> list[Backend]:
    """Asked several times per prompt, and reading folders takes longer than all else of that."""
    found: list[Backend] = []
    for entry in pkgutil.iter_modules(folders):
        found += getattr(importlib.import_module(f".{entry.name}", __name__), "BACKENDS", ())
    return sorted(found, key=lambda backend: -backend.preference)


def kind_of(device: torch.device) -> str:
    """The kind of device that measurements hold for: ``"cpu"``, ``"cuda"`` (NVIDIA), ``"rocm"`` and so on."""
    import torch

    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def gpu_of(device: torch.device) -> str:
    """The GPU behind a device, in words that tell models of GPUs apart; ``""`` where no engine needs to know."""
    from .tensorrt.gpu import Gpu

    found = Gpu.of(device)
    return "" if found is None else f"{found.sm} {found.name}"


def proven(backend: Backend, device: torch.device) -> bool:
    """Whether ``auto`` may take a backend: of others it takes only engines that proved themselves on the very GPU."""
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


def refusals(device: torch.device) -> Callable[[Manifest], Fallback | None]:
    """What tells of a manifest why its engine cannot run on a device here, or None when it can."""
    known = backends()

    def refuses(manifest: Manifest) -> Fallback | None:
        backend = known.get(manifest.identity.backend)
        if backend is None:
            return Fallback(Reason.BACKEND_MISSING, f"this version has no backend {manifest.identity.backend}")
        return backend.refuses(manifest, device)

    return refuses


def usable_backends(choice: str, device: torch.device, timed_here: Collection[str] = ()) -> list[Backend]:
    """The backends that a choice allows and that can run on a device here, the most preferred first.

    Args:
        timed_here: names of those with engines that proved themselves on this very GPU: ``auto`` allows them too.

    Raises:
        Unavailable: none; says why not, of each that could be installed.
    """
    known = backends()
    if choice == AUTO:
        allowed = [b for b in known.values() if proven(b, device) or b.name in timed_here]
        allowed = allowed or _not_on_auto(known.values(), device)
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


def serving_backends(choice: str, device: torch.device, library: Library, architecture: str) -> dict[str, Backend]:
    """The backends by name that may serve a network of an architecture, as ``usable_backends`` has them.

    Raises:
        Unavailable: as there.
    """
    timed_here = library.timed_on(gpu_of(device), architecture) if choice == AUTO else ()
    return {b.name: b for b in usable_backends(choice, device, timed_here)}


def find_engines(
    library: Library, wanted: EngineQuery, choice: str, usable: Mapping[str, Backend], device: torch.device
) -> list[Engine]:
    """The engines that serve what a node wants, the best first; see ``Library.find``.

    With ``auto`` that is the fastest one on this GPU. One that was no faster than native is none there where live
    weights can serve: these need no build.

    Args:
        usable: the ``serving_backends``.

    Raises:
        Unavailable: as ``Library.find``.
    """

    def refuses(manifest: Manifest) -> Fallback | None:
        return usable[manifest.identity.backend].refuses(manifest, device)

    wanted = replace(wanted, one_size=[b.name for b in usable.values() if b.one_size])
    if choice != AUTO:
        return library.find_all(wanted, refuses)
    unproven = [b.name for b in usable.values() if not proven(b, device)]
    live = [b.name for b in usable.values() if b.runs_live_weights]  # these do not open slow ones
    found = library.find_all(replace(wanted, fastest=True, only_timed=unproven, any_size=live), refuses)
    if not live:
        return found
    worth_it = [e for e in found if e.manifest.identity.backend in live or not trust.is_slow(e, wanted.gpu)]
    if not worth_it:
        raise library.nothing_found()
    return worth_it
