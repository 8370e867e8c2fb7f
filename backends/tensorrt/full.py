"""TensorRT 10 and 11: the fastest backend, for whoever has installed it; builds and runs on NVIDIA GPUs only."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ...engine_library import BuildError, Fallback, Reason
from .. import BuildRequest, Progress
from .backend import TensorRTBackend
from .flavour import Flavour, missing
from .gpu import Gpu

OLDEST_CAPABILITY = (7, 5)


class FullTensorRTBackend(TensorRTBackend):
    """Kernels are chosen by timing them, so an engine belongs to one model of GPU and one version of TensorRT."""

    name = "tensorrt"
    preference = 30
    measured_on = ()
    builds_on_gpu = True
    flavour = Flavour("tensorrt", "TensorRT", ((10, 1), (12, 0)), "tensorrt")

    def target(self, device: torch.device) -> str:
        """The GPU, as in ``sm_90 NVIDIA H200``."""
        gpu = Gpu.of(device)
        return "no GPU" if gpu is None else _words(gpu)

    def runs_on(self, target: str, gpu: Gpu) -> bool:
        return target == _words(gpu)

    def wrong_gpu(self, device: torch.device) -> Fallback | None:
        if (why := super().wrong_gpu(device)) is not None:
            return why
        gpu = Gpu.of(device)
        if gpu.capability < OLDEST_CAPABILITY:
            return Fallback(Reason.WRONG_GPU, f"TensorRT needs compute capability 7.5 or newer, this GPU is {gpu}")
        return None

    def cannot_build(self, device: torch.device) -> Fallback | None:
        """Kernels are timed on the GPU, so where it cannot run it cannot build."""
        return self.unavailable(device) or missing(self.flavour, "polygraphy")

    def build(self, request: BuildRequest, progress: Progress) -> list[str]:
        from .build import build_engine_file

        with torch.cuda.device(self._gpu_for(request.target)):
            return build_engine_file(self.flavour, request, progress, timing_cache=self._timing_cache(request))

    def _gpu_for(self, target: str) -> int:
        """Index of the GPU that a build is meant for, among those that this process sees."""
        seen = [self.target(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        if target not in seen:
            raise BuildError(
                f"TensorRT builds only on the GPU that the engine is for: that is {target}, and here is "
                f"{', '.join(seen) or 'none'}; nothing was built and native keeps serving; build it on that machine"
            )
        return seen.index(target)

    def _timing_cache(self, request: BuildRequest) -> Path:
        """What tactics took is kept per GPU and version beside the engines: later builds measure less."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.version()} {request.target}".lower()).strip("-")
        return request.folder.parent / f".timing-{words}.cache"


def _words(gpu: Gpu) -> str:
    return f"{gpu.sm} {gpu.name}"


BACKEND = FullTensorRTBackend()
