"""A UNet on several GPUs: ComfyUI's copy of a model on another GPU gets an engine of its own there.

*MultiGPU CFG Split* copies the model for each further GPU, and shares the calls of each step among the copies. Each GPU
has a thread of its own for that. These threads know nothing of the run: they are lent its context, so that they count,
watch for NaN and leave calls to native as the sampling thread does.
"""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING

from ..comfy_model.network import NativeNetwork
from .engine_handle import EngineHandle
from .run_context import current_run

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

COPIES = "multigpu"
"""Under this name a patcher has ComfyUI's copies of its model on other GPUs."""


def on_its_gpu(handle: EngineHandle, copy: ModelPatcher) -> EngineHandle:
    """Return a handle like ``handle`` for ComfyUI's copy of its model on another GPU.

    The copy's network has the patches of the engine node, not those that were added behind it.
    """
    patcher = handle.network.patcher.clone(model_override=copy.get_clone_model_override())
    patcher.load_device = copy.load_device
    patcher.set_additional_models(COPIES, [])
    network = NativeNetwork.of_model(patcher, handle.network.label)
    found = EngineHandle(network, handle.choice, handle.library, handle.node_id, handle.node_key)
    found.patcher.clone_base_uuid = handle.patcher.clone_base_uuid  # so ComfyUI makes no other one
    return found


def in_run(context: Context | None) -> Context | None:
    """Return a context to make a call in, where this thread belongs to no run although one is under way."""
    return None if context is None or current_run() is not None else context.copy()
