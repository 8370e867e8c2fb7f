"""ComfyUI's dynamic loading of weights on the CPU; ComfyUI has it for a GPU alone."""

from __future__ import annotations

from typing import Any

import torch
from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic


class DynamicOnCPU(ModelPatcherDynamic):
    """ComfyUI's own class. A double are its pages of GPU memory and its pinned memory: there are none."""

    def __new__(cls, *_: Any, **__: Any) -> DynamicOnCPU:
        return object.__new__(cls)

    def register_load_device(self, device: torch.device) -> None:
        self.model.dynamic_pins.setdefault(device, {"hostbufs_initialized": True, "failed": False, "active": False})

    def load(self, *arguments: Any, **options: Any) -> None:
        self.model.times_staged = self.times_staged + 1
        super().load(*arguments, **options)

    @property
    def times_staged(self) -> int:
        """Count of stagings of the model's weights, by whichever patcher."""
        return getattr(self.model, "times_staged", 0)

    @property
    def pins(self) -> dict[str, bool]:
        return self.model.dynamic_pins[self.load_device]

    def loaded_ram_size(self) -> int:
        return 0

    pinned_memory_size = loaded_ram_size

    def partially_unload_ram(self, *_: Any, **__: Any) -> int:
        return 0

    def partially_unload(self, *_: Any, **__: Any) -> int:
        return self.restore_loaded_backups()


def on_cpu(native: ModelPatcher) -> DynamicOnCPU:
    """A patcher of the same model that loads dynamically."""
    patcher = DynamicOnCPU(native.model, native.load_device, native.offload_device, native.model_size())
    patcher.cached_patcher_init = native.cached_patcher_init
    return patcher
