"""The GPU that engines are built for and measured on, and its driver."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as engines see it: name and compute capability."""

    name: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """The GPU behind a device, or None when it is no NVIDIA GPU (torch calls AMD's "cuda" too)."""
        import torch

        if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
            return None
        return cls(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))

    @property
    def sm(self) -> str:
        """Its compute capability as manifests spell it: ``sm_89``."""
        return "sm_{}{}".format(*self.capability)

    @property
    def model(self) -> str:
        """Words that tell models of GPUs apart, as in ``sm_90 NVIDIA H200``."""
        return f"{self.sm} {self.name}"

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def gpu_of(device: torch.device) -> str:
    """The model of the GPU behind a device; ``""`` where no engine needs to know."""
    found = Gpu.of(device)
    return "" if found is None else found.model


def kind_of(device: torch.device) -> str:
    """The kind of device that measurements hold for: ``"cpu"``, ``"cuda"`` (NVIDIA), ``"rocm"`` and so on."""
    import torch

    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


@functools.cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver, or ``""`` if its tool does not tell; asked once per process."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return (version.split() or [""])[0]
