"""Order of a build."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..architectures.shapes import Profile
from ..backends import Backend
from ..comfy_model.network import NativeNetwork
from ..comfy_model.weight_patches import version_of


@dataclass(frozen=True)
class BuildOrder:
    """Order of a build: the network, precision, shapes, backend and device (the network's by default).

    Attributes:
        replaceable: whether the engine takes other weights, so that it serves all checkpoints of the network's
            layout with any LoRA; see ``any_weights``.
        loras: the LoRAs in the network's weights, in words for people.
    """

    network: NativeNetwork
    precision: str
    profile: Profile
    backend: Backend
    device: torch.device | None = None
    replaceable: bool = False
    loras: str = ""

    @property
    def any_weights(self) -> bool:
        """Tell whether the engine will take any weights: if requested, and its backend can build such engines."""
        return self.replaceable and self.backend.refits

    @property
    def engine_profile(self) -> Profile:
        """The shapes that the engine will take."""
        return self.backend.engine_profile(self.profile)

    @property
    def changes(self) -> str:
        """Words for changes of the file's weights that are built in; else ``""``."""
        if self.any_weights or self.backend.runs_live_weights or version_of(self.network.patcher) is None:
            return ""
        return self.loras or "other weights"

    def words(self) -> str:
        """Describe the engine for people."""
        words = f"{self.backend.name}, {self.precision}, {self.network.architecture().words(self.engine_profile)}"
        also = "any LoRA" if self.any_weights else self.changes
        return f"{words}, {also}" if also else words

    @property
    def target_device(self) -> torch.device:
        return self.device or self.network.device
