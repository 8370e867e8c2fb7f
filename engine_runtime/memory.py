"""Engines in ComfyUI's memory management: it sees their size, loads them before sampling, and may evict them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from comfy.model_patcher import ModelPatcher

if TYPE_CHECKING:
    from .engine_handle import EngineHandle


class EngineModule(torch.nn.Module):
    """The "model" that ComfyUI manages: no parameters, only the handle whose engine holds the memory."""

    def __init__(self, handle: EngineHandle):
        super().__init__()
        self.handle = handle
        self.device = torch.device("cpu")


class EnginePatcher(ModelPatcher):
    """A patcher whose size is that of an engine; it loads whole or not at all. Clones share the engine."""

    @classmethod
    def of(cls, handle: EngineHandle) -> EnginePatcher:
        device = handle.network.device
        return cls(EngineModule(handle), load_device=device, offload_device=torch.device("cpu"))

    def model_size(self) -> int:
        session = self.model.handle.session
        return session.bytes if session is not None else 0

    def loaded_size(self) -> int:
        session = self.model.handle.session
        return session.bytes if session is not None and session.loaded else 0

    def load(self, device_to: torch.device | None = None, *_: Any, **__: Any) -> None:
        """Mark it as on the device; the engine itself opens at its first call, where a failure has a fallback."""
        self.model.device = device_to or self.load_device
        self.model.current_weight_patches_uuid = self.patches_uuid
        self.model.model_loaded_weight_memory = self.loaded_size()

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        before = self.loaded_size()
        self.load(device_to)
        return self.loaded_size() - before

    def partially_unload(
        self, device_to: torch.device, memory_to_free: int = 0, force_patch_weights: bool = False
    ) -> int:
        freed = self.loaded_size()
        self._release()
        return freed

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:  # False: a clone takes over, with the same engine
            self._release()
        return self.model

    def _release(self) -> None:
        if self.model.handle.session is not None:
            self.model.handle.session.unload()
        self.model.device = self.offload_device
        self.model.model_loaded_weight_memory = 0
