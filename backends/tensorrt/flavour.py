"""The two packages, TensorRT and TensorRT-RTX: which versions serve, and how they are found and imported.

Both have the same Python API as far as engines are built and run here; a ``Flavour`` tells them apart.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch

from ...engine_library import Fallback, Reason, Unavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flavour:
    """One of the two packages.

    Attributes:
        module: what to import.
        title: its name for people.
        versions: the versions that can be used, from the first up to but without the second.
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


def import_flavour(flavour: Flavour) -> ModuleType:
    """The package, imported.

    Raises:
        Unavailable: it is not installed, cannot be loaded, or has a version that does not serve.
    """
    found = _import(flavour)
    if isinstance(found, Fallback):
        raise Unavailable(found.reason, found.detail)
    return found


def cannot_import(flavour: Flavour, *packages: str) -> Fallback | None:
    """Return why a flavour, or one of the other packages that a build needs, cannot be imported; None when all can."""
    for name in packages:
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
    if not flavour.versions[0] <= numbers < flavour.versions[1]:
        return Fallback(
            Reason.BACKEND_MISSING,
            f"{flavour.title} {version} is installed and cannot be used ({flavour.install})",
        )
    return module
