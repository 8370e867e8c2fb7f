"""The sampler patch: routes a MODEL's UNet calls into an engine, call by call, or leaves them to native."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP
from comfy_api.torch_helpers.torch_compile import TORCH_COMPILE_KWARGS

from ..engine_library import Fallback, Reason, WeightPatches
from ..engine_library.native import UNET_PREFIX
from .control_stack import run_stacks_at_once
from .engine_handle import EngineHandle
from .ledger import open_tally
from .native_weights import NativeWeights
from .timing import timed

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher

KEY = "hybrid_trt"

STRANGER = "a second model without TRT Sampler Patch"
"""Under this name calls are counted that a patched model's sampling makes of a model that is not its own."""

_bases: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[BaseModel]] = weakref.WeakKeyDictionary()
"""UNet -> the model that it belongs to, of all models that were patched."""


def patch_model(model: ModelPatcher, handle: EngineHandle, refusal: Fallback | None = None) -> ModelPatcher:
    """A clone of ``model`` whose UNet calls go to the handle's engine whenever it can serve them.

    Args:
        refusal: a reason that holds for all calls, for example that the engine is another model's.
    """
    patched = model.clone()
    patched.remove_wrappers_with_key(WrappersMP.DIFFUSION_MODEL, KEY)
    router = UNetRouter(patched, handle, refusal)
    patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, router)
    patched.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    patched.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, router.begin_run)
    router.native_weights.attach(patched, KEY)
    patched.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, KEY)
    patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, run_stacks_at_once)
    patched.set_additional_models(KEY, [handle.patcher])
    return patched


class UNetRouter:
    """A DIFFUSION_MODEL wrapper that puts the engine in the place of the native forward.

    It replaces ``executor.original`` and goes on, instead of answering itself: so wrappers that other nodes added,
    before or after, still run around the engine (EasyCache decides whether the engine is called at all).
    """

    def __init__(self, model: ModelPatcher, handle: EngineHandle, refusal: Fallback | None):
        self._base = model.model
        _bases[_uncompiled(self._base.diffusion_model)] = weakref.ref(self._base)
        # an engine has the weights of the node that made it, and not those of a model that was patched on the way here
        theirs = handle.network.patcher
        self._weight_patches = WeightPatches(theirs if theirs.model is self._base else model)
        self._handle = handle
        self._refusal = refusal
        self._compiled: tuple[dict, Callable[..., torch.Tensor]] | None = None
        self.native_weights = NativeWeights(partial(_plan, handle, refusal, self._weight_patches))

    def begin_run(self, patcher: ModelPatcher) -> None:
        """An ON_PRE_RUN callback: ComfyUI has loaded the weights, wherever they are now."""
        if patcher.model is self._base and self._handle.session is not None:
            self._handle.session.begin_run(patcher)

    @torch.compiler.disable  # another node may compile the UNet: there is nothing to trace in an engine
    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> torch.Tensor:
        called_on = executor.class_obj
        if self._is_our_unet(called_on):
            executor.original = partial(self._route, executor.original)
        elif (router := _router_of(called_on)) is not None:  # the second model of a guider that samples with two
            executor.original = partial(router._route, executor.original)
        else:
            executor.original = partial(self._pass_by, executor.original)
        return executor(*args, **kwargs)

    def _route(
        self,
        native: Callable[..., torch.Tensor],
        /,
        x: torch.Tensor,
        timesteps: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
        control: Mapping | None = None,
        transformer_options: dict | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        """A call of our UNet: ``UNetModel.forward``'s arguments and result."""
        options = {} if transformer_options is None else transformer_options
        patcher = self._base.current_patcher
        self._handle.begin_run(patcher)  # first: which engine serves decides what it may not serve
        refusal = self._refusal or self._why_native(patcher, context, control, options, extra)

        def inputs() -> dict[str, torch.Tensor]:
            given = {"x": x, "timesteps": timesteps, "context": context}
            if y is not None:
                given["y"] = y
            given.update(self._residuals(control))
            return given

        outputs = self._handle.serve(refusal, inputs, patcher)
        if outputs is None:
            self.native_weights.bring()
            forward = self._as_compiled(native)
            # a copy each time: native takes the residuals out of the lists
            return self._handle.native(
                lambda: forward(x, timesteps, context, y, _copied(control), options, **extra)
            )
        options["original_shape"] = list(x.shape)  # native leaves it there for others to read
        return outputs["out"].to(x.device, x.dtype)

    def _pass_by(self, native: Callable[..., torch.Tensor], /, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A call of a UNet that is not ours: native serves it, and it is counted for itself."""
        handle = self._handle
        if _on_several_gpus(kwargs.get("transformer_options") or (args[5] if len(args) > 5 else None) or {}):
            handle.serve(SEVERAL_GPUS, dict)
            return handle.native(lambda: native(*args, **kwargs))
        tally = open_tally("unet", STRANGER, handle.node_id, device=handle.network.device)
        tally.count_native(Fallback(Reason.OTHER_MODEL, "the call is for another model, or a copy of ours"))
        with timed(tally.times):
            return native(*args, **kwargs)

    def _why_native(
        self,
        patcher: ModelPatcher | None,
        context: torch.Tensor | None,
        control: Mapping | None,
        options: Mapping,
        extra: Mapping,
    ) -> Fallback | None:
        """The reason why native has to serve a call, whatever its shapes, or None."""
        if patcher is None:
            return Fallback(Reason.OTHER_MODEL, "the call comes from outside of sampling")
        if _on_several_gpus(options):
            return SEVERAL_GPUS
        if (fallback := _why_not_patched_so(patcher, self._weight_patches, self._handle)) is not None:
            return fallback
        if (name := _active_patch(options)) is not None:
            return Fallback(Reason.MODEL_PATCHED, name)
        if control is not None and any(r is not None for r in control.get("input", ())):
            return Fallback(Reason.UNSUPPORTED_INPUT, "a T2I-adapter acts on the encoder")
        if context is None:
            return Fallback(Reason.UNSUPPORTED_INPUT, "there is no prompt")
        for name, value in extra.items():
            if value is not None:
                return Fallback(Reason.UNSUPPORTED_INPUT, name)
        return None

    def _as_compiled(self, native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Native's forward, compiled if another node compiles the UNet around this call and so does not see inside."""
        patcher = self._base.current_patcher
        options = None if patcher is None else patcher.model_options.get(TORCH_COMPILE_KWARGS)
        if options is None or not hasattr(self._base.diffusion_model, "_orig_mod"):
            return native
        if self._compiled is None or self._compiled[0] != options:
            self._compiled = (options, torch.compile(native, **options))
        return self._compiled[1]

    def _is_our_unet(self, called_on: object) -> bool:
        unet = self._base.diffusion_model
        return called_on is unet or called_on is _uncompiled(unet)

    def _residuals(self, control: Mapping | None) -> dict[str, torch.Tensor]:
        """Engine input name -> residual. ``control`` is only read: native would pop from its lists.

        Native takes residuals from the end of each list, so the last one belongs to the last input block.
        """
        if control is None:
            return {}
        given = {}
        outputs = control.get("output", ())
        for i, residual in enumerate(outputs, start=self._output_slots() - len(outputs)):
            if residual is not None and i >= 0:
                given[f"control_output_{i}"] = residual
        middle = control.get("middle", ())
        if middle and middle[-1] is not None:
            given["control_middle_0"] = middle[-1]
        return given

    def _output_slots(self) -> int:
        return len(self._base.diffusion_model.input_blocks)


def _copied(control: Mapping | None) -> dict | None:
    return None if control is None else {name: list(residuals) for name, residuals in control.items()}


SEVERAL_GPUS = Fallback(Reason.MODEL_PATCHED, "MultiGPU CFG Split shares each step among GPUs; an engine is on one")


def _on_several_gpus(options: Mapping) -> bool:
    """Whether a call is one of several that ComfyUI makes at once, each in a thread and on a GPU of its own."""
    return options.get("multigpu_thread_device") is not None


def _uncompiled(unet: torch.nn.Module) -> torch.nn.Module:
    """The UNet itself where torch.compile's stands."""
    return getattr(unet, "_orig_mod", unet)


def _router_of(unet: object) -> UNetRouter | None:
    """The router of the patched model that a UNet is being sampled for, if it is one."""
    known = _bases.get(unet) if isinstance(unet, torch.nn.Module) else None
    base = known() if known is not None else None
    patcher = getattr(base, "current_patcher", None)
    found = patcher.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY) if patcher is not None else []
    return next((router for router in found if isinstance(router, UNetRouter) and router._base is base), None)


def _plan(
    handle: EngineHandle,
    refusal: Fallback | None,
    weight_patches: WeightPatches,
    patcher: ModelPatcher,
    options: Mapping,
) -> bool:
    """Look the engine up for a run that ComfyUI plans; whether native weights beside it would lie there unused.

    Told as far as can be before the first call: an engine with weights of its own is expected to serve all calls.
    """
    handle.plan(patcher)
    serves = refusal is None and handle.fallback is None
    serves = serves and _why_not_patched_so(patcher, weight_patches, handle) is None and _active_patch(options) is None
    handle.patcher.model.expected = serves
    return serves and handle.session.owns_weights(patcher)


def _why_not_patched_so(patcher: ModelPatcher, weight_patches: WeightPatches, handle: EngineHandle) -> Fallback | None:
    """The reason why a model that is patched in this way is no longer the engine's, or None."""
    if patcher.hook_patches or patcher.current_hooks or patcher.forced_hooks:
        return Fallback(Reason.HOOKS, "the conditioning or the model carries weight hooks")
    if handle.follows_patches:
        if patcher.model is not handle.network.patcher.model:
            return Fallback(Reason.OTHER_MODEL, f"it computes with the weights of {handle.network.label}")
    elif not weight_patches.same_on(patcher):
        return Fallback(Reason.WEIGHTS_PATCHED, "a LoRA or another weight patch was added after the engine node")
    if patcher.injections or any(f"{name}.".startswith(UNET_PREFIX) for name in patcher.object_patches):
        return Fallback(Reason.MODEL_PATCHED, "another node replaced a part of the UNet")
    return None


_ONE_PATCH_KEYS = ("optimized_attention_override",)


def _active_patch(options: Mapping) -> str | None:
    """The name of a patch inside the UNet that another node set for this call, or None."""
    for name, patches in options.get("patches", {}).items():
        if patches:
            return name
    for name, patches in options.get("patches_replace", {}).items():
        if patches:
            return f"{name} replaced"
    return next((key for key in _ONE_PATCH_KEYS if options.get(key) is not None), None)
