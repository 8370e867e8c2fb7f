"""ComfyUI's dynamic loading of weights on the CPU; ComfyUI has it for a GPU alone."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from comfy import memory_management
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


def weight_when_called(
    layer: torch.nn.Module,
    dtype: torch.dtype,
    patched_in: torch.dtype | None = None,
    rounds: bool = False,
    calls: int = 1,
) -> torch.Tensor:
    """The weight that ComfyUI's own code gives a large layer in the last of its calls, without pages of GPU memory.

    Args:
        dtype: what the layer asks for.
        patched_in: what it wants its patches to be computed in.
        rounds: whether it wants the weight rounded again.
        calls: of several, pages keep the weight in between.
    """
    parts, there = [layer.weight, layer.bias], torch.empty(0)
    geometry = memory_management.tensors_to_geometries(parts)
    pages = torch.empty(memory_management.vram_aligned_size(geometry), dtype=torch.uint8)
    for source, page in zip(parts, memory_management.interpret_gathered_like(geometry, pages), strict=True):
        if source is not None:
            page.copy_(source)
    layer._prefetch = {"resident": False, "needs_cast": False, "xfer_dest": pages, "cast_dest": None,
                       "cast_geometry": geometry, "signature": "pages" if calls > 1 else None}  # fmt: skip
    try:
        for _ in range(calls):
            there, _ = comfy.ops.resolve_cast_module_with_vbar(layer, dtype, pages.device, dtype, patched_in, rounds)
        return there
    finally:
        for name in ("_prefetch", "_v_weight", "_v_bias", "_v_signature"):
            layer.__dict__.pop(name, None)
