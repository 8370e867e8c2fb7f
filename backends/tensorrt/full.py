"""TensorRT 10 and 11, for whoever has installed one of them; builds and runs on NVIDIA GPUs only."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ...engine_library import BuildError, Fallback, Reason
from ...engine_library.gpu import Gpu, gpu_of
from .. import BuildRequest, Progress
from . import version8
from .backend import TensorRTBackend
from .build import build_engine_file
from .flavour import Flavour, cannot_import

OLDEST = (7, 5)
"""The oldest compute capability that it supports."""


class FullTensorRTBackend(TensorRTBackend):
    """Kernels are chosen by timing them, so an engine belongs to one model of GPU and one version of TensorRT."""

    name = "tensorrt"
    preference = 30
    measured_on = ()
    builds_on_gpu = True
    flavour = Flavour("tensorrt", "TensorRT", ((10, 1), (12, 0)), "tensorrt")

    def target(self, device: torch.device) -> str:
        return gpu_of(device) or "no GPU"

    def runs_on(self, target: str, gpu: Gpu) -> bool:
        return target == gpu.model

    def cannot_run(self, device: torch.device) -> Fallback | None:
        if (why := super().cannot_run(device)) is not None:
            return why
        gpu = Gpu.of(device)
        if gpu.capability >= OLDEST:
            return None
        last = f"the last version that supports it: {version8.INSTALL}"
        return Fallback(Reason.WRONG_GPU, f"TensorRT {self.version()} has dropped this GPU, {gpu}; {last}")

    def cannot_build(self, device: torch.device) -> Fallback | None:
        """Kernels are timed on the GPU, so where it cannot run it cannot build."""
        return self.cannot_run(device) or cannot_import(self.flavour, "polygraphy")

    def build(self, request: BuildRequest, progress: Progress) -> list[str]:
        with torch.cuda.device(self._gpu_for(request.target)):
            return build_engine_file(self.flavour, request, progress, None, self._timing_cache(request), self.steps)

    def _gpu_for(self, target: str) -> int:
        """Index of the GPU that a build is meant for, among the GPUs that this process sees."""
        seen = [self.target(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        if target not in seen:
            raise BuildError(
                f"TensorRT builds only on the GPU that the engine is for: that is {target}, and here is "
                f"{', '.join(seen) or 'none'}; nothing was built and the normal model keeps running; build it on "
                "that machine"
            )
        return seen.index(target)

    def _timing_cache(self, request: BuildRequest) -> Path:
        """Return what tactics took is kept per GPU and version beside the engines: later builds measure less."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.version()} {request.target}".lower()).strip("-")
        return request.folder.parent / f".timing-{words}.cache"


BACKEND = FullTensorRTBackend()
