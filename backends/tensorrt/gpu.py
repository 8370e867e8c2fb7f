"""GPUs in the words of engines."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
