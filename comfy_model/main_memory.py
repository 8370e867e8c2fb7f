"""Tensors in main memory from which a GPU copies while it computes. ComfyUI pins them, and counts them with its own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
PAGE = 4096
"""Bytes of a page. CUDA pins whole pages, and none twice, so no two tensors share one."""


class MainMemory:
    """Named tensors in main memory. They are pinned where ComfyUI pins memory and has not reached its limit.

    Copies from memory that is not pinned are slower, and as right.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, bool]] = {}
        weakref.finalize(self, _free, self._tensors).atexit = False

    def new(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor, in place of an earlier one of this name."""
        from comfy import model_management

        self.free([name])
        size = math.prod(shape) * dtype.itemsize
        whole = -(-size // PAGE) * PAGE
        memory = torch.empty(whole + PAGE, dtype=torch.uint8)
        pages = memory[-memory.data_ptr() % PAGE :][:whole]
        self._tensors[name] = pages, torch.cuda.is_available() and model_management.pin_memory(pages)
        return pages[:size].view(dtype).view(shape)

    def free(self, names: Collection[str] | None = None) -> None:
        """Let go of tensors, of all by default; names without one are left alone."""
        found = list(self._tensors if names is None else names)
        _free({name: self._tensors.pop(name) for name in found if name in self._tensors})


def wait_for_copies() -> None:
    """Wait until no GPU reads main memory any more: what it reads may be freed or written then."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _free(tensors: dict[str, tuple[torch.Tensor, bool]]) -> None:
    from comfy import model_management

    if tensors:
        wait_for_copies()
    for tensor, pinned in tensors.values():
        if pinned:
            model_management.unpin_memory(tensor)
    tensors.clear()


def available_bytes() -> float:
    """Return the main memory that can be taken while nothing else is swapped out or ended."""
    import psutil  # ComfyUI itself needs it

    return min(psutil.virtual_memory().available, _left_in_container())


def _left_in_container() -> float:
    """Return the free bytes below the container's limit; infinite without a limit."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # none, "max", or not Linux
        return float("inf")
    files = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return max(0, limit - used + files)
