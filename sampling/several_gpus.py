"""Several GPUs: ComfyUI's copies of a model and of ControlNets on other GPUs get engines of their own there.

*MultiGPU CFG Split* copies the model for each further GPU, and shares the calls of each step among the copies. Each GPU
has its own thread. The threads borrow the run's context, so that they count calls, watch for NaN and leave calls to
native as the sampling thread does.

A model patch is ComfyUI's same object for all GPUs. But its network is on one GPU, and its attributes hold values from
layer to layer, so that a GPU's layers would take another GPU's values. So each GPU has a patch of its own, with a
network of its own.

A step with a single call, as at cfg 1, leaves the other GPUs idle. Of some families these then share the call's tokens.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management, multigpu
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher

from ..architectures import absorbed_patch
from ..architectures.model_patches import companion_of, models_of
from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.module_copy import native_copy
from ..comfy_model.network import COPIES, NativeNetwork
from ..comfy_model.weight_hash import look_for_edits
from ..engine_library import Fallback, Reason, Unavailable
from ..engine_library.engine import relative_error
from ..sessions.graph_memory import give_back_graph_memory
from ..sessions.shared_call import run_shared
from . import NotCopied
from .controlnet import EngineControlModel, back_with_engine, chain_of
from .engine_handle import EngineHandle
from .report import times
from .run_context import in_run

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

    from ..architectures.calls import AsyncInputs

log = logging.getLogger(__name__)

THREAD = "multigpu_thread_device"
"""Key of a call's GPU in its options, where ComfyUI makes several calls at once."""

_copied_companions: weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.device, tuple[int, ModelPatcher]]] = (
    weakref.WeakKeyDictionary()
)
"""A companion -> device -> the edition of its weights that was copied there, and the copy."""

FURTHEST = {"float32": 1e-3}
"""Precision -> how far a shared call may be from one GPU's, by ``relative_error``; others are rounded more."""
FURTHEST_ROUNDED, TRIED = 5e-2, 3
"""So far in half precision; and so many calls are computed in both ways, the last of which is timed.

One GPU runs the first call plainly, captures a graph in the second, and replays it in the third.
"""

SEVERAL_GPUS = Fallback(
    Reason.MODEL_PATCHED,
    "MultiGPU CFG Split made a copy of the model that no engine is known for",
    advice="remove MultiGPU CFG Split if you want the engine",
)


class PatchesOnGpus:
    """The model patch, on each GPU, of a model that several GPUs sample with, if engines compute its kind."""

    def __init__(self) -> None:
        self._parts: Mapping[str, Any] = {}
        self._own: dict[torch.device, dict[str, Any]] = {}

    def plan(self, patcher: ModelPatcher, copy: ModelPatcher) -> bool:
        """Give a model, and its copy on another GPU, a patch each. The copy has its own from now on.

        Returns:
            True if the patch of that GPU has another network than before, since its weights were edited.
        """
        options = copy.model_options["transformer_options"]
        patches = options.get("patches", {})
        found = absorbed_patch(copy.model.diffusion_model, patches)
        parts = {} if found is None else {place: patches[place][0] for place in found[0].places}
        if {p: id(part) for p, part in parts.items()} != {p: id(part) for p, part in self._parts.items()}:
            self._parts, self._own = parts, {}
        if found is None:
            return False
        kind, patch = found
        if patcher.load_device not in self._own:
            self._own[patcher.load_device] = kind.again(patches, companion_of(patch))
        device, known = copy.load_device, self._own.get(copy.load_device)
        network = _on(companion_of(patch), device)
        edited = known is not None and network not in [one for part in known.values() for one in models_of(part)]
        if known is None or edited:
            known = self._own[device] = kind.again(patches, network)
        options["patches"] = {**patches, **{place: [part] for place, part in known.items()}}
        return edited

    def put(self, options: Mapping[str, Any]) -> None:
        """Replace the shared patch by the GPU's own in the options of a call there."""
        device, patches = options.get(THREAD), options.get("patches", {})
        for place, part in self._own.get(device, {}).items():
            if hasattr(part, "to"):  # as ComfyUI does with the shared patch
                part.to(device)
            patches[place] = [part if one is self._parts[place] else one for one in patches.get(place, ())]


def _on(companion: ModelPatcher, device: torch.device) -> ModelPatcher:
    """Return the patcher of a patch's network, or of the network's copy on another device."""
    if companion.load_device == device or companion.patches:  # patched weights may be in the network itself
        return companion
    copies = _copied_companions.setdefault(companion.model, {})
    edition = look_for_edits(companion)
    if device not in copies or copies[device][0] != edition:
        model_management.unload_model_and_clones(companion)  # else the copy would lie on its device too
        with torch.inference_mode(False):  # the threads of GPUs are outside of it
            network = native_copy(companion.model)
        copies[device] = edition, ModelPatcher(network, device, companion.offload_device)
    return copies[device][1]


@dataclass
class Trial:
    """Calls for latents of one size that were computed in both ways: their number, and seconds of the last."""

    calls: int = 0
    shared: float = 0.0
    alone: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.calls == TRIED

    @property
    def is_lost(self) -> bool:
        """True where sharing is not faster."""
        return self.is_over and self.shared >= self.alone


class SharedRun(NotCopied):
    """A run that several GPUs share: its sampling thread's context, lent to the GPUs' threads until it ends.

    Attributes:
        context: the current run's context; None without a run, or where a single GPU samples.
        patches: the model patch of each GPU.
        alone: whether the step has a single call, so that the other GPUs have none.
        unshared: why the tokens of such calls are not shared among the GPUs in this run, or None.
        never: why they are not in any run of this model, or None.
    """

    def __init__(self) -> None:
        self.context: Context | None = None
        self.patches = PatchesOnGpus()
        self.alone = False
        self.unshared: str | None = None
        self.never: str | None = None
        self._trials: dict[str, Trial] = {}
        self._trial = Trial()
        self._controls: list[EngineControlModel] = []
        self._devices: list[torch.device] = []
        self._threads: list[ThreadPoolExecutor] = []

    def prepare(
        self, executor: WrapperExecutor, model: ModelPatcher, noise_shape: Any, conds: Mapping[str, list], *rest: Any,
        **more: Any,
    ) -> Any:  # fmt: skip
        """Give ControlNets an engine on each GPU before ComfyUI copies them; a PREPARE_SAMPLING wrapper."""
        devices = [copy.load_device for copy in model.get_additional_models_with_key(COPIES)]
        if devices:
            self.context, self._devices = copy_context(), [model.load_device, *devices]
            self._trial = self._trials.setdefault(str(noise_shape), Trial())
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
        self.alone, self.unshared = False, self.never

    def step(self, executor: WrapperExecutor, model: Any, conds: Any, *rest: Any) -> Any:
        """Notice whether a step has a single call; a CALC_COND_BATCH wrapper."""
        self.alone = sum(len(group or ()) for group in conds) == 1
        return executor(model, conds, *rest)

    def run(
        self, handle: EngineHandle, others: Mapping[EngineHandle, ModelPatcher], given: Mapping[str, torch.Tensor],
        extras: Mapping[str, Any] | None, late: AsyncInputs | None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Run a call on all GPUs, which share its tokens; where that is not possible, on its own.

        Args:
            others: the handles of the other GPUs, and the patchers that ComfyUI samples with there.
        """
        trial, several = self._trial, f"{1 + len(others)} GPUs"
        share = partial(_shared, self._threads, handle, others, given, extras)
        if trial.is_lost:
            self.unshared = f"it takes {times(1e3 * trial.alone)}, and {several} {times(1e3 * trial.shared)}"
        self.unshared = self.unshared or _why_unshared(handle)
        if self.unshared is None and late is None:
            try:
                shared = share() if trial.is_over else self._compared(share, handle, given, extras)
                said = f"The first {TRIED} steps are computed by {several} and by one, to compare both"
                if trial.is_over and not trial.is_lost:
                    took, alone = (times(1e3 * seconds) for seconds in (trial.shared, trial.alone))
                    said = f"{several} share the tokens of each step: {took} instead of {alone}"
                handle.stats.add_remark(said)
                return shared
            except Unavailable as error:
                self.unshared = error.fallback.detail
                log.warning("Hybrid TRT: one GPU computes what several could share (%s)", self.unshared)
        if self.unshared is not None:
            handle.stats.add_remark(f"One GPU computed each step: {self.unshared}")
        return handle.session.run(given, extras, late)

    def _compared(
        self, share: Callable[[], dict[str, torch.Tensor]], handle: EngineHandle, given: Mapping[str, torch.Tensor],
        extras: Mapping[str, Any] | None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Run a call on all GPUs, and on one: Unavailable where the first is wrong."""
        device, trial = handle.network.device, self._trial
        shared, trial.shared = _timed(share, device)
        expected, trial.alone = _timed(lambda: handle.session.run(given, extras), device)
        trial.calls += 1
        error = max(relative_error(shared[name], expected[name]) for name in expected)
        if not error <= FURTHEST.get(handle.network.precision, FURTHEST_ROUNDED):
            self.never = f"its result and that of several differ by {error:.1e}; please report this"
            raise Unavailable(Reason.ENGINE_FAILED, self.never)
        if trial.is_over and not trial.is_lost:
            handle.session.graphs.clear()  # one GPU's, which hold memory
        return shared

    def here(self) -> Context | None:
        """Return the context to make a call in, or None for the caller's own."""
        return in_run(self.context)


def _why_unshared(handle: EngineHandle) -> str | None:
    """Return why GPUs cannot share the tokens of a model's calls, or None."""
    network = handle.network
    if getattr(network.architecture(), "shared", None) is None:
        return "GPUs cannot share the tokens of this model"
    if not network.shares_tokens:
        return "GPUs share its tokens if MultiGPU CFG Split stands before the engine node"
    return None if handle.session.calls_attention else "GPUs share its tokens with the torch backend"


def _shared(
    threads: list[ThreadPoolExecutor], handle: EngineHandle, others: Mapping[EngineHandle, ModelPatcher],
    given: Mapping[str, torch.Tensor], extras: Mapping[str, Any] | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    for other, patcher in others.items():
        if patcher is None:
            raise Unavailable(Reason.OTHER_MODEL, "ComfyUI samples on a single GPU")
        other.begin_run(patcher)
        if (why := other.why_native_now()) is not None:
            raise Unavailable.of(why)
        if not other.session.calls_attention:
            raise Unavailable(Reason.OTHER_KIND, "the engines of the GPUs differ")
        other.session.sync_from(other.network, patcher)
    network, all_of_them = handle.network, [handle, *others]
    tensors = (specs(network.module, network.precision) for specs in
               (network.architecture().inputs, network.architecture().outputs))  # fmt: skip
    devices = [one.network.device for one in all_of_them]
    while len(threads) < len(devices):
        threads.append(ThreadPoolExecutor(1, "hybrid-trt-gpu"))
    return run_shared([one.session for one in all_of_them], devices, network.architecture(), *tensors, given, extras,
                      threads[: len(devices)])  # fmt: skip


def _timed(run: Callable[[], dict[str, torch.Tensor]], device: torch.device) -> tuple[dict[str, torch.Tensor], float]:
    """Return what ``run`` gives, and the seconds until it is computed."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    synchronize(device)
    began = time.perf_counter()
    found = run()
    synchronize(device)
    return found, time.perf_counter() - began


def on_several_gpus(options: Mapping) -> bool:
    """Tell whether ComfyUI makes several calls at once, each in a thread and on a GPU of its own."""
    return options.get(THREAD) is not None


def forget_dead_models() -> None:
    """Drop models whose patchers are gone from ComfyUI's list: *MultiGPU CFG Split* visits each of them."""
    if None in model_management.loaded_models():
        model_management.cleanup_models_gc()


def on_all_gpus(model: ModelPatcher) -> ModelPatcher:
    """Return a model with a copy on each further GPU, as *MultiGPU CFG Split* makes them. Copies of that node stay."""
    if not works(Feature.SEVERAL_GPUS):
        return model
    forget_dead_models()
    count = len(model_management.get_all_torch_devices())
    return multigpu.create_multigpu_deepclones(model, count, reuse_loaded=True)


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
    its = handle.network
    found = handle.like(replace(network, keeps_tokens=its.keeps_tokens, shares_tokens=its.shares_tokens))
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
