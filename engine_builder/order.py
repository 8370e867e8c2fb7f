"""What to build."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..architectures.tensors import Profile
from ..backends import Backend
from ..native_model.network import NativeNetwork


@dataclass(frozen=True)
class BuildOrder:
    """What to build: which network, how precise, for which shapes, by whom, for which device (the network's)."""

    network: NativeNetwork
    precision: str
    profile: Profile
    backend: Backend
    device: torch.device | None = None

    def words(self) -> str:
        """What is built, for people."""
        return f"{self.backend.name}, {self.precision}, {self.network.architecture().words(self.profile)}"

    @property
    def target_device(self) -> torch.device:
        return self.device or self.network.device
