"""How plain torch computes these networks fastest: the memory layout of tensors, and the kernel for attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the memory layout that networks compute in: channels_last on a GPU, where that is faster."""
    if tensor.ndim == 4 and tensor.is_cuda:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


@contextlib.contextmanager
def best_attention(device: torch.device) -> Iterator[None]:
    """Inside, attention takes cuDNN's kernel where that is fastest (Hopper and later), else torch's own order."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        yield
        return
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, cuDNN's convolutions of float32 are exact; torch lets them round to TF32's ten bits by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
