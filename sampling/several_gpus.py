"""Several GPUs: ComfyUI's copies of a model and of ControlNets on other GPUs get engines of their own there.

*MultiGPU CFG Split* copies the model for each further GPU, and shares the calls of each step among the copies. Each GPU
has its own thread. The threads borrow the run's context, so that they count calls, watch for NaN and leave calls to
native as the sampling thread does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import Context, copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher

from ..comfy_model.module_copy import native_copy
from ..comfy_model.network import NativeNetwork
from ..comfy_model.patches_on_gpus import THREAD, PatchesOnGpus
from ..engine_library import Fallback, Reason
from ..sessions.cuda_capture import give_back_graph_memory
from . import NotCopied
from .controlnet import EngineControlModel, back_with_engine, chain_of
from .engine_handle import EngineHandle
from .run_context import in_run

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

COPIES = "multigpu"
"""Key in a patcher of ComfyUI's copies of its model on other GPUs."""

SEVERAL_GPUS = Fallback(
    Reason.MODEL_PATCHED,
    "MultiGPU CFG Split made a copy of the model that no engine is known for",
    advice="remove MultiGPU CFG Split if you want the engine",
)


class SharedRun(NotCopied):
    """A run that several GPUs share: its sampling thread's context, lent to the GPUs' threads until it ends.

    Attributes:
        context: the current run's context; None without a run, or where a single GPU samples.
        patches: the model patch of each GPU.
    """

    def __init__(self) -> None:
        self.context: Context | None = None
        self.patches = PatchesOnGpus()
        self._controls: list[EngineControlModel] = []
        self._devices: list[torch.device] = []

    def prepare(
        self, executor: WrapperExecutor, model: ModelPatcher, noise_shape: Any, conds: Mapping[str, list], *rest: Any,
        **more: Any,
    ) -> Any:  # fmt: skip
        """Give ControlNets an engine on each GPU before ComfyUI copies them; a PREPARE_SAMPLING wrapper."""
        devices = [copy.load_device for copy in model.get_additional_models_with_key(COPIES)]
        if devices:
            self.context, self._devices = copy_context(), [model.load_device, *devices]
            self._controls = list(_engine_controls(conds, devices))
            for control in self._controls:
                control.run = self.context
        return executor(model, noise_shape, conds, *rest, **more)

    def end_run(self, _patcher: ModelPatcher) -> None:
        """Let go of the run, and of the memory that its graphs keep on each GPU; an ON_CLEANUP callback."""
        for control in self._controls:
            control.run = None
        for device in self._devices:
            give_back_graph_memory(device)
        self.context, self._controls, self._devices = None, [], []

    def here(self) -> Context | None:
        """Return the context to make a call in, or None for the caller's own."""
        return in_run(self.context)


def on_several_gpus(options: Mapping) -> bool:
    """Tell whether ComfyUI makes several calls at once, each in a thread and on a GPU of its own."""
    return options.get(THREAD) is not None


def forget_dead_models() -> None:
    """Drop models whose patchers are gone from ComfyUI's list: *MultiGPU CFG Split* visits each of them."""
    if None in model_management.loaded_models():
        model_management.cleanup_models_gc()


def on_its_gpu(handle: EngineHandle, copy: ModelPatcher) -> EngineHandle:
    """Return a handle like ``handle`` for ComfyUI's copy of its model on another GPU.

    The copy's network has the patches of the engine node, without patches that came later. Its model patch is that
    GPU's own.
    """
    patcher = handle.network.patcher.clone(model_override=copy.get_clone_model_override())
    patcher.load_device = copy.load_device
    patcher.set_additional_models(COPIES, [])
    PatchesOnGpus().plan(handle.network.patcher, patcher)
    network = NativeNetwork.of_model(patcher, handle.network.label)
    found = handle.like(replace(network, keeps_tokens=handle.network.keeps_tokens))
    found.patcher.clone_base_uuid = handle.patcher.clone_base_uuid  # so ComfyUI makes no other clone
    return found


def _engine_controls(conds: Mapping[str, list], devices: list[torch.device]) -> Iterator[EngineControlModel]:
    """Iterate over the networks of a run's engine-backed ControlNets, on all GPUs; missing networks are made."""
    chains = (chain_of(cond.get("control")) for group in conds.values() for cond in group or ())
    for control in {id(control): control for chain in chains for control in chain}.values():
        model = getattr(control, "control_model", None)
        if type(control) is not ControlNet or not isinstance(model, EngineControlModel):
            continue
        yield model
        for device in devices:
            if device not in control.multigpu_clones and not control.control_model_wrapped.patches:
                control.multigpu_clones[device] = _control_on(control, model, device)
            its = getattr(control.multigpu_clones.get(device), "control_model", None)
            if isinstance(its, EngineControlModel):
                yield its


def _control_on(control: ControlNet, model: EngineControlModel, device: torch.device) -> ControlNet:
    """Return a copy of an engine-backed ControlNet on another GPU, as ComfyUI copies a native ControlNet."""
    made = control.copy()
    if device not in model.on_gpus:
        native, before = control.copy(), model.native_patcher
        with torch.inference_mode(False):  # the threads of GPUs are outside of it, and native's weights are used there
            native.control_model = native_copy(model.native)
        native.control_model_wrapped = ModelPatcher(native.control_model, device, before.offload_device)
        network = replace(model.network, patcher=native.control_model_wrapped, module=native.control_model)
        model.on_gpus[device] = back_with_engine(native, model.handle.like(network)).control_model
    made.control_model = model.on_gpus[device]
    made.control_model_wrapped = made.control_model.patcher
    return made
