"""TensorRT-RTX: installs with pip, builds in seconds without a GPU, runs on GeForce and RTX cards."""

from __future__ import annotations

import re

import torch

from ...engine_library import Fallback, Reason
from ...engine_library.gpu import Gpu
from .. import BuildRequest, Progress
from .backend import TensorRTBackend
from .build import build_engine_file
from .flavour import Flavour, cannot_import

SUPPORTED = frozenset({(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)})
"""Compute capabilities that an engine can be built for."""

PORTABLE = "portable"
"""Target of an engine that runs on all of them but Turing (7.5), which wants an engine of its own."""


class TensorRTRTXBackend(TensorRTBackend):
    """Kernels are compiled for the very GPU when an engine is opened, so the file depends on no model of card."""

    name = "tensorrt_rtx"
    preference = 20
    measured_on = ()
    builds_on_gpu = False
    refits = False  # such builds want a GPU, and nobody has refitted an engine of RTX yet
    flavour = Flavour("tensorrt_rtx", "TensorRT-RTX", ((1, 7), (1, 8)), "tensorrt-rtx")

    def target(self, device: torch.device) -> str:
        """This GPU's compute capability (``sm_89``) when it is one that RTX supports, else ``portable``."""
        gpu = Gpu.of(device)
        return gpu.sm if gpu is not None and gpu.capability in SUPPORTED else PORTABLE

    def runs_on(self, target: str, gpu: Gpu) -> bool:
        return target == gpu.sm or (target == PORTABLE and gpu.capability >= (8, 0))

    def wrong_gpu(self, device: torch.device) -> Fallback | None:
        if (why := super().wrong_gpu(device)) is not None:
            return why
        gpu = Gpu.of(device)
        if gpu.capability not in SUPPORTED:
            return Fallback(Reason.WRONG_GPU, f"TensorRT-RTX runs on GeForce and RTX cards only, this GPU is {gpu}")
        return None

    def cannot_build(self, device: torch.device) -> Fallback | None:
        """Only for want of packages: a build needs no GPU."""
        return cannot_import(self.flavour, "polygraphy")

    def build(self, request: BuildRequest, progress: Progress) -> list[str]:
        # by number and not as "the current GPU", so that a process without one builds the same
        numbers = re.fullmatch(r"sm_(\d+)(\d)", request.target)
        capabilities = [(int(numbers[1]), int(numbers[2]))] if numbers else None
        return build_engine_file(self.flavour, request, progress, compute_capabilities=capabilities)


BACKEND = TensorRTRTXBackend()
