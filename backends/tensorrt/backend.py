"""Base of the two TensorRT backends."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ...engine_library import Engine, Fallback, Manifest, Reason
from ...engine_library.disk import Settings
from ...engine_library.engine import PARAMETERS_NAME
from ...engine_library.gpu import Gpu
from ..file_backend import FileBackend
from .build import ENGINE_NAME, STEPS
from .flavour import Flavour, cannot_import, import_flavour
from .runner import OpenedEngine, TensorRTRunner


class TensorRTBackend(FileBackend):
    """The part of the backend protocol in which the two flavours agree; they differ in GPUs and in targets.

    Attributes:
        steps: the steps of a build in which versions differ.
        opened_engine: the class of an open engine.
    """

    flavour: Flavour
    steps = STEPS
    opened_engine = OpenedEngine
    file_names = (ENGINE_NAME, PARAMETERS_NAME)
    refits = True
    notice = "experimental: never run on a GPU by us"
    keeps_weights = True

    def options(self, settings: Settings) -> dict[str, Any]:
        """Return the effort of the search for fast kernels, 1 to 5; 0 leaves it to TensorRT."""
        return {"level": settings.tensorrt_level}

    def build_memory(self, weights: int) -> int:
        return int(2.2 * weights)

    def version(self) -> str:
        """Exact version of the installed package: an engine runs with no other.

        Raises:
            Unavailable: the package is not there, or cannot be loaded.
        """
        return import_flavour(self.flavour).__version__

    @abstractmethod
    def runs_on(self, target: str, gpu: Gpu) -> bool:
        """Tell whether an engine built for a target runs on a GPU."""

    def wrong_gpu(self, device: torch.device) -> Fallback | None:
        """Return why this flavour does not run on a device whatever is installed, or None."""
        if Gpu.of(device) is None:
            return Fallback(Reason.WRONG_GPU, f"{self.flavour.title} needs an NVIDIA GPU, the model runs on {device}")
        return None

    def cannot_import(self) -> Fallback | None:
        return cannot_import(self.flavour)

    def cannot_run(self, device: torch.device) -> Fallback | None:
        return self.wrong_gpu(device) or self.cannot_import()

    def cannot_use(self, manifest: Manifest, device: torch.device) -> Fallback | None:
        if (why := self.cannot_run(device)) is not None:
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
        with torch.cuda.device(device):
            opened = self.opened_engine(import_flavour(self.flavour), self.flavour.title, engine, device)
            return TensorRTRunner(self.flavour.title, opened)
