"""Memory that the driver keeps for CUDA graphs on a GPU while none of them runs.

A graph that was recorded under cudaMallocAsync, ComfyUI's usual allocator, allocates as it runs. What it took stays for
its next replay, and nobody else on the GPU can have it; torch's own allocator keeps such memory in pools instead, out
of reach of this module.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import torch

log = logging.getLogger(__name__)

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
