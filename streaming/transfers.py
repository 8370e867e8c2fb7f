"""Copies between main memory and the device that the host does not wait for."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on the device, in the same memory layout. The host does not wait for the device's other work."""
    if tensor.device == device or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Return a tensor in main memory, and the event after which it is there."""
    if not tensor.is_cuda:
        return tensor, None
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor.contiguous(), non_blocking=True)
    return there, torch.cuda.current_stream(tensor.device).record_event()
