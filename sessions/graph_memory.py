"""GPU memory of CUDA graphs.

A graph that was captured under cudaMallocAsync allocates as it runs. The driver keeps that memory for the next replay,
and nobody else on the GPU can have it. torch's own allocator keeps it in pools instead.
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


def free_idle_memory(device: torch.device) -> None:
    """Free memory of earlier runs that torch keeps outside of graphs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_room_for_graphs(size: int, device: torch.device) -> None:
    """Have ``size`` bytes free for graphs that run next.

    Under dynamic VRAM ComfyUI's weights take what is free. They give way to tensors of torch, and not to graphs.
    """
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < size:
        torch.empty(size, dtype=torch.uint8, device=device)
        free_idle_memory(device)


def give_back_graph_memory(device: torch.device) -> int:
    """Wait for the current stream, then free the memory that idle graphs keep; the next replays allocate it anew.

    Returns:
        The bytes that were freed; 0 where there are no such graphs.
    """
    if not (before := graph_memory(device)):
        return 0
    torch.cuda.current_stream(device).synchronize()
    _driver_call("cuDeviceGraphMemTrim", _handle(_index(device)))
    return before - graph_memory(device)


def graph_memory(device: torch.device) -> int:
    """Return the bytes that graphs keep on a GPU between replays; 0 where torch's own allocator keeps them."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return 0
    value = ctypes.c_uint64()
    handle = _handle(_index(device))
    if handle is None or not _driver_call("cuDeviceGetGraphMemAttribute", handle, RESERVED, ctypes.byref(value)):
        return 0
    return value.value


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """Return NVIDIA's driver, which torch has loaded already; None on other GPUs."""
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError as error:
        log.info("Hybrid TRT: CUDA graphs keep their memory between prompts (%s)", error)
        return None


@functools.cache
def _handle(index: int) -> int | None:
    """Return the driver's handle of a GPU."""
    handle = ctypes.c_int()
    return handle.value if _driver_call("cuDeviceGet", ctypes.byref(handle), index) else None


def _driver_call(name: str, *arguments: object) -> bool:
    """Call a function of the driver; False if it failed, which only means that memory stays where it is."""
    call = getattr(_driver(), name, None)
    if call is None:
        return False
    code = call(*arguments)
    if code:
        log.debug("Hybrid TRT: %s gave %s", name, code)
    return code == 0
