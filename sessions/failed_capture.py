"""What is left of a CUDA graph's recording that failed: its error's frames, and in them tensors.

With torch's own allocator all of it may go. With cudaMallocAsync, which ComfyUI prefers, a tensor that was made while
recording has an address that only the graph could have given memory: it holds none, and freeing it ends the process. So
such tensors stay for good, and all else in the frames (weights, activations of before, the network) goes. Later
recordings in this process may get the same addresses again and then fail as well: those shapes run plainly.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from collections.abc import Iterator

import torch

_never_freed: list[torch.Tensor] = []

OURS = 3
"""References to an object of a list that nobody else has: the list's, the loop's and the argument's."""


def release_failed_capture(error: BaseException, device: torch.device) -> None:
    """Empty the frames of a failed recording's error. What the caller's own frame holds stays the caller's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    tensors = _tensors_on(device) if _frees_are_fatal(device) else []
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
    for tensor in tensors:
        if sys.getrefcount(tensor) == OURS:  # it would have died with the frames
            _never_freed.append(tensor)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))  # not even when the process ends


def _frees_are_fatal(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def _tensors_on(device: torch.device) -> list[torch.Tensor]:
    """Every tensor of this process on a kind of device."""
    every = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
    return [tensor for tensor in every if tensor.device.type == device.type]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came of."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            waiting += [link.__cause__, link.__context__]
            yield link
