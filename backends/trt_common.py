"""What the TensorRT and TensorRT-RTX backends share: finding the package, its log, GPUs in words, engines that fit.

Both packages have the same Python API as far as engines are built and run here; a ``Flavour`` tells them apart.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..engine_library import Engine, Fallback, Manifest, Reason, Unavailable

if TYPE_CHECKING:
    from .trt_runner import TensorRTRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flavour:
    """One of the two packages.

    Attributes:
        module: what to import.
        title: its name for people.
        versions: the versions that serve, from the first up to but without the second.
        package: its name on PyPI, for CUDA 13; with ``-cu12`` behind it, for CUDA 12.
    """

    module: str
    title: str
    versions: tuple[tuple[int, int], tuple[int, int]]
    package: str

    @property
    def install(self) -> str:
        """The command that installs what fits this torch."""
        package = f"{self.package}-cu12" if (torch.version.cuda or "").startswith("12.") else self.package
        oldest, beyond = (f"{major}.{minor}" for major, minor in self.versions)
        return f'pip install "{package}>={oldest},<{beyond}"'


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as engines see it: name and compute capability."""

    name: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """The GPU behind a device, or None when it is no NVIDIA GPU (torch calls AMD's "cuda" too)."""
        if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
            return None
        return cls(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))

    @property
    def sm(self) -> str:
        """Its compute capability as manifests spell it: ``sm_89``."""
        return "sm_{}{}".format(*self.capability)

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


class TensorRTBackend:
    """The part of the backend protocol in which the two flavours agree; they differ in GPUs and in targets."""

    flavour: Flavour
    build_memory = 2.2

    def version(self) -> str:
        """Exact version of the installed package: an engine runs with no other.

        Raises:
            Unavailable: the package is not there, or cannot be loaded.
        """
        return import_flavour(self.flavour).__version__

    def target(self, device: torch.device) -> str:
        raise NotImplementedError

    def runs_on(self, target: str, gpu: Gpu) -> bool:
        """Whether an engine built for a target runs on a GPU."""
        raise NotImplementedError

    def wrong_gpu(self, device: torch.device) -> Fallback | None:
        """Why this flavour does not run on a device whatever is installed, or None."""
        if Gpu.of(device) is None:
            return Fallback(Reason.WRONG_GPU, f"{self.flavour.title} needs an NVIDIA GPU, the model runs on {device}")
        return None

    def unavailable(self, device: torch.device) -> Fallback | None:
        return self.wrong_gpu(device) or missing(self.flavour)

    def refuses(self, manifest: Manifest, device: torch.device) -> Fallback | None:
        if (why := self.unavailable(device)) is not None:
            return why
        identity, title = manifest.identity, self.flavour.title
        if identity.backend_version != self.version():
            return Fallback(
                Reason.STALE_ENGINE,
                f"it was built with {title} {identity.backend_version} and {self.version()} is installed",
            )
        gpu = Gpu.of(device)
        if not self.runs_on(identity.device, gpu):
            return Fallback(Reason.WRONG_GPU, f"the {title} engine was built for {identity.device}, this GPU is {gpu}")
        return None

    def load(self, engine: Engine, device: torch.device) -> TensorRTRunner:
        from .trt_runner import TensorRTRunner

        return TensorRTRunner(import_flavour(self.flavour), self.flavour.title, engine, device)


def import_flavour(flavour: Flavour) -> ModuleType:
    """The package, imported.

    Raises:
        Unavailable: it is not installed, cannot be loaded, or has a version that does not serve.
    """
    found = _import(flavour)
    if isinstance(found, Fallback):
        raise Unavailable(found.reason, found.detail)
    return found


def missing(flavour: Flavour, *others: str) -> Fallback | None:
    """Why a flavour, or one of the other packages that a build needs, cannot be imported; None when all can."""
    for name in others:
        if find_spec(name) is None:
            return Fallback(Reason.BACKEND_MISSING, f"{name} is not installed (pip install {name})")
    found = _import(flavour)
    return found if isinstance(found, Fallback) else None


def _import(flavour: Flavour) -> ModuleType | Fallback:
    if find_spec(flavour.module) is None:
        return Fallback(Reason.BACKEND_MISSING, f"{flavour.title} is not installed ({flavour.install})")
    return _import_once(flavour)


@functools.cache
def _import_once(flavour: Flavour) -> ModuleType | Fallback:
    try:
        module = importlib.import_module(flavour.module)
        version = module.__version__
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except Exception as error:  # a library that does not load raises whatever its wrapper likes
        log.debug("importing %s failed", flavour.module, exc_info=True)
        return Fallback(
            Reason.BACKEND_MISSING,
            f"{flavour.title} is installed and cannot be loaded ({type(error).__name__}: {error}); "
            f"reinstall it ({flavour.install})",
        )
    oldest, beyond = flavour.versions
    if not oldest <= numbers < beyond:
        return Fallback(
            Reason.BACKEND_MISSING,
            f"{flavour.title} {version} is installed and does not serve ({flavour.install})",
        )
    return module


@functools.cache
def shared_logger(trt: ModuleType) -> Any:
    """The logger of a flavour, one per process because TensorRT keeps the first that it is given.

    Messages go to ``logging`` at debug level, errors at info level: who meets an error raises it with its text. The
    lists in ``listeners`` get the text of each error.
    """

    class Messages(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.listeners: dict[int, list[str]] = {}

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                log.info("%s: %s", trt.__name__, text)
                for lines in list(self.listeners.values()):
                    lines.append(text)
            elif severity in (trt.ILogger.WARNING, trt.ILogger.INFO):  # verbose ones are tens of thousands
                log.debug("%s: %s", trt.__name__, text)

    return Messages()


@contextlib.contextmanager
def collected_errors(logger: Any) -> Iterator[list[str]]:
    """The errors that TensorRT logs meanwhile, in order."""
    lines: list[str] = []
    logger.listeners[id(lines)] = lines
    try:
        yield lines
    finally:
        del logger.listeners[id(lines)]


def last_errors(lines: list[str], count: int = 2) -> str:
    """The last few errors as one short line for a message."""
    frames = ("--- Begin node ---", "--- End node ---")  # the parser's dump of a node it cannot read
    telling = (" ".join(line.split()) for line in lines if not any(frame in line for frame in frames))
    unique = list(dict.fromkeys(telling))
    return "; ".join(line if len(line) <= 400 else f"{line[:397]}..." for line in unique[-count:])
