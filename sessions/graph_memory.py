"""Memory that the driver keeps for CUDA graphs on a GPU while none of them runs.

A graph that was recorded under cudaMallocAsync, ComfyUI's usual allocator, allocates as it runs. What it took stays for
its next replay, and nobody else on the GPU can have it; torch's own allocator keeps such memory in pools instead, out
of reach of this module.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import sys
import traceback
from collections.abc import Iterator

import torch

log = logging.getLogger(__name__)

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


RESERVED = 2
"""CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT of the driver's API."""


def give_back(device: torch.device) -> int:
    """Wait for the current stream, then let others have what graphs keep and do not use; the next replays take it anew.

    Returns:
        How many bytes that were; 0 where there are no such graphs.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    before = kept(index)
    if not before:
        return 0
    torch.cuda.current_stream(device).synchronize()
    _asked("cuDeviceGraphMemTrim", _handle(index))
    return before - kept(index)


def kept(index: int) -> int:
    """Bytes that graphs keep on the GPU with this number."""
    value = ctypes.c_uint64()
    handle = _handle(index)
    if handle is None or not _asked("cuDeviceGetGraphMemAttribute", handle, RESERVED, ctypes.byref(value)):
        return 0
    return value.value


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """NVIDIA's driver, which torch has loaded already; None where it is another's."""
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError as error:
        log.info("Hybrid TRT: CUDA graphs keep their memory between prompts (%s)", error)
        return None


@functools.cache
def _handle(index: int) -> int | None:
    """The driver's handle of a GPU."""
    handle = ctypes.c_int()
    return handle.value if _asked("cuDeviceGet", ctypes.byref(handle), index) else None


def _asked(name: str, *arguments: object) -> bool:
    """Call a function of the driver; whether it did as asked. A failure only means that memory stays where it is."""
    call = getattr(_driver(), name, None)
    if call is None:
        return False
    code = call(*arguments)
    if code:
        log.debug("Hybrid TRT: %s gave %s", name, code)
    return code == 0
