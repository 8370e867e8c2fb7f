"""The backend of TensorRT 8.6."""

from __future__ import annotations

import torch

from ....engine_library import Fallback, Reason
from ....engine_library.gpu import Gpu
from ..backend import TensorRTBackend
from ..flavour import Flavour
from ..full import FullTensorRTBackend
from . import INSTALL
from .build import Version8Steps
from .one_size import OneSizeBackend
from .runner import Version8Engine

OLDEST, NEWEST = (6, 0), (9, 0)
"""Compute capabilities that it supports."""


class _Flavour(Flavour):
    """The package, which has one name for all versions of CUDA."""

    install = INSTALL


class Version8Backend(OneSizeBackend, FullTensorRTBackend):
    """Its engines take one size each, and no brain floats.

    With the usual 8 MB of stack a build of SD1.5's UNet with replaceable weights was ended by SIGSEGV, with these it
    was not (one build each, on H200s).
    """

    flavour = _Flavour("tensorrt", "TensorRT", ((8, 6), (8, 7)), "tensorrt")
    precisions = ("float16", "float32")
    build_stack = 512 << 20
    steps = Version8Steps()
    opened_engine = Version8Engine
    notice = ""

    def build_memory(self, weights: int) -> int:
        """Read off builds of 0.7, 1.7 and 5.1 GB of weights."""
        return int(max(5.9e9 + 3.4 * weights, 9 * weights - 4.3e9))

    def cannot_run(self, device: torch.device) -> Fallback | None:
        if (why := TensorRTBackend.cannot_run(self, device)) is not None:
            return why
        gpu = Gpu.of(device)
        if OLDEST <= gpu.capability <= NEWEST:
            return None
        detail = f"TensorRT {self.version()} is older than this GPU, {gpu}; {FullTensorRTBackend.flavour.install}"
        return Fallback(Reason.WRONG_GPU, detail)


BACKEND = Version8Backend()
