"""Copies of frames: between main memory and the device without waiting, and within main memory in one thread.

torch shares a copy of a frame out among all cores. On a host with many, that takes longer than the copy itself, and now
and then as long as a frame.
"""

from __future__ import annotations

import numpy
import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on the device, in the same memory layout. The host does not wait for the device's other work."""
    if tensor.device == device or device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    copy(tensor, pinned)
    return pinned.to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Return a tensor in main memory, and the event after which it is there."""
    if not tensor.is_cuda:
        return tensor, None
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor.contiguous(), non_blocking=True)
    return there, torch.cuda.current_stream(tensor.device).record_event()


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape and dtype, both in main memory."""
    if source.dtype is torch.bfloat16:  # numpy has none
        target.copy_(source)
    else:
        numpy.copyto(target.numpy(), source.detach().numpy())


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two frames of one shape are apart, on average."""
    if one.is_cpu and other.is_cpu and one.dtype is torch.float32:
        return float(numpy.abs(one.numpy() - other.numpy()).mean())
    return float((one - other.to(one.device)).abs().mean())
