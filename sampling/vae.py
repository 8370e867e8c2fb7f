"""An engine-backed VAE: ComfyUI's own VAE object with engines where its network was.

The object stays ComfyUI's ``VAE``: it loads, tiles, crops and scales as ever, and its native weights stay where they
are. Only the calls of ``first_stage_model`` go to engines.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..architectures import Role
from ..architectures.shapes import Shape, ShapeMismatch, bind
from ..comfy_model.weight_patches import last_loaded, lies_on_its_model
from ..engine_library import Fallback, Reason
from . import InPlaceOfNative
from .engine_handle import EngineHandle
from .nan_guard import checked_for_nan
from .native_network import run_native

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import VAE


def native_vae(vae: VAE) -> VAE:
    """Return the native VAE behind an engine-backed VAE, with other packs' patches, or the given object."""
    model = vae.first_stage_model
    if not isinstance(model, EngineVAEModel):
        return vae
    native = copy.copy(model.native_vae)
    native.patcher = vae.patcher.clone()
    return native


def vae_with_engines(vae: VAE, handles: dict[Role, EngineHandle]) -> VAE:
    """Return a copy of a native VAE whose calls run on the engines of its handles, wherever these can serve."""
    backed = copy.copy(vae)
    backed.first_stage_model = EngineVAEModel(vae, handles)
    backed.patcher = _beside(vae.patcher, list(handles.values()))
    for role, name in ((Role.VAE_DECODER, "memory_used_decode"), (Role.VAE_ENCODER, "memory_used_encode")):
        if role in handles:
            setattr(backed, name, partial(_memory_used, handles[role], getattr(vae, name)))
    return backed


def _memory_used(handle: EngineHandle, native: Callable[[Shape, torch.dtype], int], shape: Shape, dtype: torch.dtype
                 ) -> int:
    """Return the bytes that ComfyUI has to free for a call: a compiled call's, where an engine serves it.

    ComfyUI's own estimate is for native's kernels. It is far larger, and makes ComfyUI unload the diffusion model.
    """
    session = handle.session
    if session is not None:
        network = handle.network
        architecture = network.architecture()
        specs = architecture.inputs(network.module, network.precision)
        with contextlib.suppress(ShapeMismatch):
            call = bind(specs, {specs[0].name: (1, *shape[1:])})
            if session.serves(call) is None and (own := getattr(architecture, "working_memory", None)) is not None:
                return own(call, dtype)
    return native(shape, dtype)


def _beside(native: ModelPatcher, handles: list[EngineHandle]) -> ModelPatcher:
    """Return a clone of a native patcher by which ComfyUI loads the engines, too."""
    patcher = native.clone()
    own = patcher.model_patches_models
    patcher.model_patches_models = lambda: [*own(), *(handle.patcher for handle in handles)]
    return patcher


class EngineVAEModel(InPlaceOfNative):
    """Takes the place of ``VAE.first_stage_model``: same calls, same results, by an engine or by native."""

    def __init__(self, vae: VAE, handles: dict[Role, EngineHandle]):
        self.native_vae = vae
        self.native = vae.first_stage_model
        self.handles = handles

    def decode(self, z: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the pixels of latents, both (images, channels, height, width)."""
        return self._run(Role.VAE_DECODER, self.native.decode, z, options)

    def decode_tiled(self, z: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the pixels by ComfyUI's way for VAEs that have tiles of their own."""
        handle = self.handles.get(Role.VAE_DECODER)
        if handle is None or not getattr(handle.network.architecture(), "tiles_itself", False):
            return self.native.decode_tiled(z, **options)
        return self.decode(z)

    def encode(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the latents of pixels from -1 to 1."""
        return self._run(Role.VAE_ENCODER, self.native.encode, x, options)

    def _run(
        self, role: Role, native: Callable[..., torch.Tensor], images: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Run a call image by image, because engines take one; native takes the whole call where it must."""
        handle = self.handles.get(role)
        if handle is None:
            return native(images, **options)
        patcher = last_loaded(self.native) or handle.network.patcher
        stats = handle.begin_run(patcher)
        refusal, results = handle.why_not_patched_so(patcher), []
        if self.native.current_weight_patches_uuid is not None and not lies_on_its_model(patcher):
            refusal = refusal or Fallback(Reason.WEIGHTS_PATCHED, "patches of a VAE that is gone are on its weights")
        for number, image in enumerate(images.split(1)):
            own = {name: _part_for(number, value) for name, value in options.items()}
            served, result = handle.serve(
                refusal, lambda given={"images": image, **own}: checked_for_nan(handle.bind(given)), patcher, stats)
            if not served:
                return run_native(lambda: native(images, **options), handle.stats, handle.network.device)
            results.append(result)
        return torch.cat(results) if len(results) > 1 else results[0]


def _part_for(number: int, value: Any) -> Any:
    """Return the part of a call's argument that is for one of its images: a tensor has a row for each."""
    return value[number : number + 1] if isinstance(value, torch.Tensor) else value
