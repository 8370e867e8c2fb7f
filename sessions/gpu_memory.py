"""GPU memory for engines: ComfyUI frees memory of models that the running node does not use."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from comfy import model_management

from ..comfy_model.comfyui_shims import free_memory
from ..engine_library import Reason, Unavailable
from .graph_memory import give_back_graph_memory
from .session import first_line, says_out_of_memory

log = logging.getLogger(__name__)

Result = TypeVar("Result")

EVERYTHING = 1e30
MAKE_ROOM = "close what else uses the GPU, or choose smaller pictures; another build needs as much"
"""Advice for a user without enough GPU memory."""


def make_room(size: float, device: torch.device) -> None:
    """Have ComfyUI unload models that are not in use, until ``size`` bytes and its reserve for computing are free."""
    if model_management.is_device_cpu(device):
        return
    entries = list(model_management.current_loaded_models)
    in_use = [entry for entry in entries if entry.currently_used]
    wanted = min(EVERYTHING, size + model_management.minimum_inference_memory())
    # kept alive: a model that dies with an unloaded model would leave ComfyUI's list while ComfyUI goes through it
    alive = [entry.model for entry in entries]
    model_management.free_memory(wanted, device, keep_loaded=in_use)
    del alive


def with_room(size: int, device: torch.device, start: Callable[[], Result]) -> Result:
    """Return ``start()`` with ``size`` bytes free; see ``tried_again``.

    Raises:
        Unavailable: memory is short, even after ComfyUI freed all that is not in use.
    """
    need_room(size, device)
    model_management.soft_empty_cache()  # other libraries cannot use the blocks that torch keeps
    return tried_again(start, device)


def tried_again(
    start: Callable[[], Result],
    device: torch.device,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Result:
    """Return ``start()``; if memory is short, call it once more when ComfyUI has freed all that is not in use.

    Args:
        before: gives back what the caller holds before the second call.
        after: the same where the second call lacks memory too: native needs it.

    Raises:
        Unavailable: memory is short in the second call too.
    """
    try:
        return start()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.info("Hybrid TRT: not enough memory on %s (%s), ComfyUI frees what is not in use", device, error)
    # outside of the handler: the error's frames hold the tensors of the failed call
    gc.collect()  # cycles may hold memory
    if before is not None:
        before()
    give_back_graph_memory(device)  # which graphs that are gone had
    make_room(EVERYTHING, device)
    model_management.soft_empty_cache()
    try:
        return start()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = error.fallback.detail if isinstance(error, Unavailable) else first_line(error)
    if after is not None:
        after()
        give_back_graph_memory(device)
        make_room(0, device)  # frees torch's idle blocks
    raise no_room(why)


def need_room(size: int, device: torch.device) -> None:
    """Free ``size`` bytes to hold, and ComfyUI's reserve to compute in.

    Raises:
        Unavailable: memory is short, even after ComfyUI freed all that is not in use.
    """
    make_room(size, device)
    if lacks_room(size, device):
        make_room(EVERYTHING, device)
        if lacks_room(size, device):
            raise no_room(f"it needs {size / 1e9:.1f} GB")


def no_room(why: str) -> Unavailable:
    """Return the error for an engine without enough memory."""
    return Unavailable(Reason.ENGINE_FAILED, f"not enough GPU memory ({why}); {MAKE_ROOM}")


def lacks_room(size: int, device: torch.device) -> bool:
    """Tell whether a device has less than ``size`` bytes and ComfyUI's reserve free."""
    if model_management.is_device_cpu(device):
        return False
    return free_memory(device) < size + model_management.extra_reserved_memory()


def free_room(device: torch.device) -> float:
    """Return the free bytes of a device beyond ComfyUI's reserve to compute in."""
    if model_management.is_device_cpu(device):
        return EVERYTHING
    return free_memory(device) - model_management.minimum_inference_memory()


def room_to_compute(device: torch.device) -> float:
    """Return the bytes of a GPU that ComfyUI leaves free for activations in any case."""
    if model_management.is_device_cpu(device):
        return 0
    return model_management.minimum_inference_memory() - model_management.extra_reserved_memory()


def close_engines(device: torch.device) -> None:
    """Close every engine on a device, also engines in use: native serves the rest of the run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # ControlNets of a stack may run beside the call that lacked memory
    for patcher in model_management.loaded_models():
        if hasattr(patcher, "close_engine") and patcher.load_device == device:
            patcher.close_engine()
    gc.collect()  # cycles may hold memory
    give_back_graph_memory(device)
    model_management.soft_empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory was short, by its words or its class."""
    return says_out_of_memory(error) or model_management.is_oom(error)
