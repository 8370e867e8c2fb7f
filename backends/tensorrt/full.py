"""TensorRT 8.6, 10 and 11, for whoever has installed one of them; builds and runs on NVIDIA GPUs only."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch

from ...architectures.shapes import PRECISIONS
from ...engine_library import BuildError, Fallback, Reason, Unavailable
from ...engine_library.gpu import Gpu, gpu_of
from .. import BuildRequest, Progress
from . import version8
from .backend import TensorRTBackend
from .flavour import Flavour, missing

CAPABILITIES = {8: ((6, 0), (9, 0)), 10: ((7, 5), (99, 0)), 11: ((7, 5), (99, 0))}
"""Version -> the oldest and the newest compute capability that it knows."""


LAST_FOR_OLD_GPUS = 'the last one that knows it: pip install "tensorrt==8.6.0", on Python 3.10'


class FullTensorRTBackend(TensorRTBackend):
    """Kernels are chosen by timing them, so an engine belongs to one model of GPU and one version of TensorRT."""

    name = "tensorrt"
    preference = 30
    measured_on = ()
    builds_on_gpu = True
    flavour = Flavour("tensorrt", "TensorRT", (((8, 6), (8, 7)), ((10, 1), (12, 0))), "tensorrt")

    @property
    def one_size(self) -> bool:
        """TensorRT 8.6 is fast for one size only; see ``version8``."""
        return self._is_version8

    @property
    def precisions(self) -> Collection[str]:
        return version8.PRECISIONS if self._is_version8 else PRECISIONS

    @property
    def build_stack(self) -> int:
        return version8.BUILD_STACK if self._is_version8 else 0

    def build_memory(self, weights: int) -> int:
        return version8.build_memory(weights) if self._is_version8 else super().build_memory(weights)

    @property
    def _is_version8(self) -> bool:
        try:
            return self.version().startswith("8.")
        except Unavailable:
            return False

    def target(self, device: torch.device) -> str:
        return gpu_of(device) or "no GPU"

    def runs_on(self, target: str, gpu: Gpu) -> bool:
        return target == gpu.model

    def unavailable(self, device: torch.device) -> Fallback | None:
        if (why := super().unavailable(device)) is not None:
            return why
        gpu, version = Gpu.of(device), self.version()
        oldest, newest = CAPABILITIES[int(version.split(".")[0])]
        if gpu.capability < oldest:
            return Fallback(Reason.WRONG_GPU, f"TensorRT {version} has dropped this GPU, {gpu}; {LAST_FOR_OLD_GPUS}")
        if gpu.capability > newest:
            install = self.flavour.install
            return Fallback(Reason.WRONG_GPU, f"TensorRT {version} is older than this GPU, {gpu}; {install}")
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
                f"{', '.join(seen) or 'none'}; nothing was built and the normal model keeps running; build it on "
                "that machine"
            )
        return seen.index(target)

    def _timing_cache(self, request: BuildRequest) -> Path:
        """Return what tactics took is kept per GPU and version beside the engines: later builds measure less."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.version()} {request.target}".lower()).strip("-")
        return request.folder.parent / f".timing-{words}.cache"


BACKEND = FullTensorRTBackend()
