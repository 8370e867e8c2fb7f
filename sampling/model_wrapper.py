"""The sampler patch: routes each call of a MODEL's backbone to an engine, or leaves it to native."""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..architectures import Role
from ..architectures.calls import EngineCall, serves_every_size
from ..comfy_model.attention import OVERRIDE, callable_choice, other_attention
from ..comfy_model.comfyui_internals import Feature, works
from ..comfy_model.comfyui_shims import outside_recording
from ..comfy_model.network import forward_arguments
from ..comfy_model.weight_patches import WeightPatches
from ..engine_library import Fallback, Reason
from . import NotCopied
from .call_stats import open_stats, timed
from .control_stack import LateControl, bound_unread, run_stacks_at_once
from .engine_handle import EngineHandle, Run
from .nan_guard import redo_unless_finite, watch
from .native_network import by_name, run_native, with_residuals_copied
from .native_weights import NativeWeights
from .run_context import as_run, tensors_of_run
from .run_inputs import SteadyPrompts, call_on_device, sample_on_device
from .several_gpus import COPIES, SEVERAL_GPUS, SharedRun, forget_dead_models, on_its_gpu, on_several_gpus
from .streamed_choice import why_native

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher
    from comfy.patcher_extension import WrapperExecutor

KEY = "hybrid_trt"

SECOND_MODEL = "a second model without TRT Sampler Patch"
"""Name for counted calls of another model within the sampling of a patched model."""

FUNCTION = "model_function_wrapper"
"""Key in model_options of another node's function that ComfyUI calls in place of a model."""

_PACK = re.compile(r".*[\\/]custom_nodes[\\/]([^\\/]+)")

_bases: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[BaseModel]] = weakref.WeakKeyDictionary()
"""UNet -> the model that it belongs to, for all patched models."""


def patch_model(model: ModelPatcher, handle: EngineHandle, refusal: Fallback | None = None) -> ModelPatcher:
    """Return a clone of ``model`` whose UNet calls run on the handle's engine whenever it can serve them.

    Args:
        refusal: a reason against the engine in all calls, for example an engine of another model.
    """
    patched = model.clone()
    router = BackboneRouter(patched, handle, refusal)
    on_device, stacks, prompts, several = (
        works(f) for f in (Feature.ON_DEVICE, Feature.STACKS, Feature.PROMPTS, Feature.SEVERAL_GPUS)
    )
    wrappers: dict[str, list[Callable[..., Any]]] = {
        WrappersMP.DIFFUSION_MODEL: [router],
        WrappersMP.OUTER_SAMPLE: [as_run, router.reached.sample, redo_unless_finite],
    }
    if on_device or stacks or prompts:  # a ComfyUI without these features may not have this place
        wrappers[WrappersMP.CALC_COND_BATCH] = [router.reached.step, *([router.shared.step] if several else [])]
    if on_device:
        wrappers[WrappersMP.CALC_COND_BATCH].append(call_on_device)
        wrappers[WrappersMP.OUTER_SAMPLE].append(sample_on_device)
    if prompts:
        kept = SteadyPrompts(lambda: tensors_of_run() if handle.encodes_prompts else None)
        wrappers[WrappersMP.CALC_COND_BATCH].append(kept.join)
        wrappers[WrappersMP.APPLY_MODEL] = [kept.cast]
    if stacks:
        wrappers[WrappersMP.CALC_COND_BATCH].append(partial(run_stacks_at_once, backbone=handle))
    callbacks: dict[str, list[Callable[..., Any]]] = {CallbacksMP.ON_PRE_RUN: [router.begin_run]}
    takes_part = [router.native_weights] if works(Feature.STAGING) else []
    takes_part += [router.shared] if several else []
    if takes_part:
        wrappers[WrappersMP.PREPARE_SAMPLING] = [part.prepare for part in takes_part]
        callbacks[CallbacksMP.ON_CLEANUP] = [part.end_run for part in takes_part]
    if several:
        callbacks[CallbacksMP.ON_MATCH_MULTIGPU_CLONES] = [router.match_copy]
        forget_dead_models()
    for place, ours in wrappers.items():
        patched.remove_wrappers_with_key(place, KEY)
        for wrapper in ours:
            patched.add_wrapper_with_key(place, KEY, wrapper)
    for event, ours in callbacks.items():
        patched.remove_callbacks_with_key(event, KEY)
        for callback in ours:
            patched.add_callback_with_key(event, KEY, callback)
    patched.set_additional_models(KEY, [handle.patcher])
    return patched


def with_tokens_kept(model: ModelPatcher) -> ModelPatcher:
    """Return a clone of a routed model whose engine takes the patch ``KeptTokens`` too; ``model`` where none can."""
    router = next(iter(_routers(model)), None)
    if router is None or router._refusal is not None:
        return model
    handle = router._handle.like(replace(router._handle.network, keeps_tokens=True))
    return model if handle.fallback is not None else patch_model(model, handle)


def count_as_native(model: ModelPatcher, label: str, node_id: str, fallback: Fallback) -> ModelPatcher:
    """Return a clone of ``model`` that no engine serves, whose calls are counted as native for a reason."""

    def counted(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> torch.Tensor:
        stats = open_stats(Role.BACKBONE.value, label, node_id, device=model.load_device)
        stats.count_native(fallback)
        with timed(stats.times):
            return executor(*args, **kwargs)

    patched = model.clone()
    patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, counted)
    return patched


def has_engine(model: ModelPatcher) -> bool:
    """Tell whether a sampler patch already routes a model's UNet."""
    return bool(_routers(model))


def encodes_prompts(model: ModelPatcher) -> bool:
    """Tell whether a part of the model's engine runs once per prompt, and not in each step."""
    return any(router._handle.encodes_prompts for router in _routers(model))


def _routers(model: ModelPatcher) -> list[BackboneRouter]:
    wrappers = model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY)
    return [wrapper for wrapper in wrappers if isinstance(wrapper, BackboneRouter)]


class BackboneRouter(NotCopied):
    """A DIFFUSION_MODEL wrapper that replaces the native forward by the engine.

    It replaces ``executor.original`` and goes on. So wrappers of other nodes still run around the engine, for example
    EasyCache, which decides if the engine is called at all.
    """

    def __init__(self, model: ModelPatcher, handle: EngineHandle, refusal: Fallback | None):
        self._base = model.model
        _bases[_uncompiled(self._base.diffusion_model)] = weakref.ref(self._base)
        # an engine has the weights at its own node, without patches that came later
        theirs = handle.network.patcher
        self._weight_patches = WeightPatches(theirs if theirs.model is self._base else model)
        self._handle = handle
        self._arguments = handle.network.arguments()
        self._refusal = refusal
        self._compiled: tuple[dict, Callable[..., torch.Tensor]] | None = None
        self.native_weights = NativeWeights(partial(_plan, handle, refusal, self._weight_patches))
        self.reached = Reached(handle)
        self._copies: dict[torch.device, BackboneRouter] = {}
        self.shared = SharedRun()

    def match_copy(self, patcher: ModelPatcher, copy: ModelPatcher) -> None:
        """Plan a run of ComfyUI's copy of the model on another GPU; an ON_MATCH_MULTIGPU_CLONES callback."""
        if patcher.model is not self._base:
            return
        edited = self.shared.patches.plan(patcher, copy)
        if self._refusal is not None:
            return
        device, known = copy.load_device, self._copies.get(copy.load_device)
        if known is None or known._base is not copy.model or edited:
            known = self._copies[device] = BackboneRouter(copy, on_its_gpu(self._handle, copy), None)
        _plan(known._handle, None, known._weight_patches, copy, {})
        copy.set_additional_models(KEY, [known._handle.patcher])

    def begin_run(self, patcher: ModelPatcher) -> None:
        """Tell the session that ComfyUI has loaded the weights; an ON_PRE_RUN callback."""
        if patcher.model is self._base and works(Feature.SEVERAL_GPUS):
            devices = {copy.load_device for copy in patcher.get_additional_models_with_key(COPIES)}
            self._copies = {device: copy for device, copy in self._copies.items() if device in devices}
        for router in (self, *self._copies.values()):
            if patcher.model is router._base and router._handle.session is not None:
                router._handle.session.begin_run(patcher)

    @torch.compiler.disable  # another node may compile the UNet: there is nothing to trace in an engine
    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> torch.Tensor:
        called_on = executor.class_obj
        ours = (router for router in (self, *self._copies.values()) if router._is_our_unet(called_on))
        if (router := next(ours, None)) is not None:
            executor.original = partial(router._route, executor.original)
        elif (router := _router_of(called_on)) is not None:  # the second model of a guider that samples with two
            executor.original = partial(router._route, executor.original)
        else:
            executor.original = partial(self._pass_by, executor.original, called_on)
        if self.shared.context is not None:
            self.shared.patches.put(by_name(self._arguments, args, kwargs).get("transformer_options") or {})
        context = self.shared.here()
        return executor(*args, **kwargs) if context is None else context.run(executor, *args, **kwargs)

    def _route(self, native: Callable[..., torch.Tensor], /, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Serve a call of our backbone, with its forward's arguments and result."""
        handle, patcher = self._handle, self._base.current_patcher
        self.reached.calls += 1
        given = by_name(self._arguments, args, kwargs)
        with outside_recording():
            stats = handle.begin_run(patcher)
            refusal = self._refusal or self._why_native(patcher, given.get("transformer_options") or {})
            served, result = handle.serve(refusal, lambda: self._bound(given), patcher, stats, self._on_all_gpus())
            if served:
                watch(result)
                return result
        self.native_weights.bring()
        forward = self._as_compiled(native)
        result = run_native(
            lambda: with_residuals_copied(forward, self._arguments, args, kwargs), handle.stats, handle.network.device
        )
        watch(result, by_engine=False)
        return result

    def _on_all_gpus(self) -> Run | None:
        """Return what runs a call on all GPUs, where they have no other call and may share its tokens; else None."""
        copies = self._copies.values()
        if not copies or not self.shared.alone or self._handle.session is None:
            return None
        return partial(self.shared.run, self._handle, {copy._handle: copy._base.current_patcher for copy in copies})

    def _bound(self, given: Mapping[str, Any]) -> EngineCall:
        late = isinstance(given.get("control"), LateControl) and self._handle.session.takes_late
        call = bound_unread(self._handle.bind, given) if late else self._handle.bind(given)
        if self._handle.session.calls_attention:
            call.extras = {**call.extras, OVERRIDE: (given.get("transformer_options") or {}).get(OVERRIDE)}
        return call

    def _pass_by(self, native: Callable[..., torch.Tensor], called_on: object, /, *args: Any, **kwargs: Any) -> Any:
        """Serve a call of another backbone with native, and count it separately."""
        handle = self._handle
        self.reached.calls += 1
        given = by_name(forward_arguments(type(_uncompiled(called_on))), args, kwargs)
        if on_several_gpus(given.get("transformer_options") or {}):
            stats = handle.begin_run()
            stats.count_native(self._refusal or SEVERAL_GPUS)
            return run_native(lambda: native(*args, **kwargs), stats, handle.network.device)
        stats = open_stats(Role.BACKBONE.value, SECOND_MODEL, handle.node_id, device=handle.network.device)
        stats.count_native(Fallback(Reason.OTHER_MODEL, "the call is for another model, or a copy of ours"))
        with timed(stats.times):
            result = native(*args, **kwargs)
        watch(result, by_engine=False)
        return result

    def _why_native(self, patcher: ModelPatcher | None, options: Mapping) -> Fallback | None:
        """Return the reason why native has to serve a call, whatever its tensors, or None."""
        if patcher is None:
            return Fallback(Reason.OTHER_MODEL, "the call comes from outside of sampling")
        if on_several_gpus(options) and not works(Feature.SEVERAL_GPUS):
            return SEVERAL_GPUS
        handle = self._handle
        if (fallback := handle.why_not_patched_so(patcher, self._weight_patches)) is not None:
            return fallback
        return _why_patched(handle, options)

    def _as_compiled(self, native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return native's forward, compiled if another node compiles the UNet: that cannot trace our wrapper."""
        patcher = self._base.current_patcher
        if patcher is None or not hasattr(self._base.diffusion_model, "_orig_mod"):
            return native
        options = patcher.model_options.get(_compile_key())
        if options is None:
            return native
        if self._compiled is None or self._compiled[0] != options:
            self._compiled = (options, torch.compile(native, **options))
        return self._compiled[1]

    def _is_our_unet(self, called_on: object) -> bool:
        unet = self._base.diffusion_model
        return called_on is unet or called_on is _uncompiled(unet)


class Reached(NotCopied):
    """Counts the sampling steps in which a patched model's UNet was not called, because another node computes it.

    Step caches leave out steps too, but they call the UNet at least once, and do not replace the model.

    Attributes:
        calls: number of calls of the UNet so far.
    """

    def __init__(self, handle: EngineHandle):
        self._handle = handle
        self._left_out = 0
        self.calls = 0

    def sample(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Sample, then count the steps that did not call the UNet as native; an OUTER_SAMPLE wrapper."""
        before, self._left_out = self.calls, 0
        result = executor(*args, **kwargs)
        steps = self._left_out
        if self.calls == before:
            sigmas = kwargs["sigmas"] if "sigmas" in kwargs else args[3]
            steps = len(sigmas) - 1
        if steps > 0:
            self._count(steps, executor.class_obj.model_options.get(FUNCTION))
        return result

    def step(self, executor: WrapperExecutor, model: Any, conds: Any, x: Any, timestep: Any, options: dict) -> Any:
        """Notice a function that replaced the model and did not call the UNet; a CALC_COND_BATCH wrapper."""
        if FUNCTION not in options:
            return executor(model, conds, x, timestep, options)
        before = self.calls
        result = executor(model, conds, x, timestep, options)
        self._left_out += self.calls == before
        return result

    def _count(self, steps: int, function: Any) -> None:
        network = self._handle.network
        stats = open_stats(network.role.value, network.label, self._handle.node_id, self._handle.node_key)
        for _ in range(steps):
            stats.count_native(Fallback(Reason.NOT_REACHED, _who(function)))


def _who(function: Any) -> str:
    """Return words for the code that computed instead, with the folder of its pack if known."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found = _PACK.match(getattr(module, "__file__", None) or "")
    pack = f" ({found[1]})" if found else ""
    return f"another node{pack} computes the UNet by itself"


@functools.cache
def _compile_key() -> str | None:
    """Return the key of the options with which ComfyUI's node compiles a UNet."""
    if not works(Feature.COMPILED_NATIVE):
        return None
    from comfy_api.torch_helpers.torch_compile import TORCH_COMPILE_KWARGS

    return TORCH_COMPILE_KWARGS


def _uncompiled(unet: torch.nn.Module) -> torch.nn.Module:
    """Return the UNet inside of torch.compile's wrapper."""
    return getattr(unet, "_orig_mod", unet)


def _router_of(unet: object) -> BackboneRouter | None:
    """Return the router of the patched model whose UNet is being sampled, or None."""
    known = _bases.get(unet) if isinstance(unet, torch.nn.Module) else None
    base = known() if known is not None else None
    patcher = getattr(base, "current_patcher", None)
    found = _routers(patcher) if patcher is not None else []
    return next((router for router in found if router._base is base), None)


def _plan(
    handle: EngineHandle,
    refusal: Fallback | None,
    weight_patches: WeightPatches,
    patcher: ModelPatcher,
    options: Mapping,
    noise_shape: Sequence[Any] = (),
) -> bool:
    """Look the engine up for a run that ComfyUI plans. True if the run would not use native's weights.

    This is a forecast before the first call: an engine with weights of its own is expected to serve all calls.

    Args:
        noise_shape: the run's, where the faster of engine and native is to be chosen.
    """
    handle.plan(patcher)
    serves = refusal is None and handle.fallback is None
    serves = serves and handle.why_not_patched_so(patcher, weight_patches) is None
    serves = serves and _why_patched(handle, options) is None
    if serves and noise_shape and (slower := why_native(handle, patcher, noise_shape)) is not None:
        handle.patcher.close_engine(slower)
        return False
    handle.patcher.model.expected = serves
    return serves and handle.session.owns_weights(patcher)


def _why_patched(handle: EngineHandle, options: Mapping) -> Fallback | None:
    """Return the reason why native serves a call that another node has patched inside, or None."""
    if (fallback := handle.network.why_patched(options.get("patches", {}))) is not None:
        return fallback
    for name, patches in options.get("patches_replace", {}).items():
        if patches:
            return Fallback(Reason.MODEL_PATCHED, f"{name} replaced")
    override = options.get(OVERRIDE)
    name = None if override is None else other_attention(override)
    if name is None:
        return None
    if callable_choice(override) is None or handle.session is None:
        return Fallback(Reason.MODEL_PATCHED, f"attention by {name}")
    if handle.session.calls_attention:
        return None
    in_blocks = serves_every_size(handle.network.architecture())
    advice = "put the engine node behind the node that chooses attention" if in_blocks else ""
    return Fallback(Reason.MODEL_PATCHED, f"attention by {name}", advice=advice)
