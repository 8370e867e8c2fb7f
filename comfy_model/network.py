"""A loaded native network as the builder and the nodes see it: one module inside one ComfyUI patcher."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..architectures import Architecture, Role, architecture_of
from ..engine_library.fallback import Fallback, Reason, Unavailable
from .attention import part_replaced, preference_class, unknown_preference
from .changed_layers import LayerWatch
from .hash_cache import hashes_without_patches
from .stored_weights import has_quantised
from .weight_formats import multiplies_in_fp8, rounded_unlike, unreadable_weights
from .weight_hash import Check, fingerprint, forget_hash, known_hash, weights_hash

if TYPE_CHECKING:
    from comfy.controlnet import ControlNet
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import VAE

UNET_PREFIX = "diffusion_model."
_CAST = "manual_cast_dtype"
"""Under this name a patcher has the compute dtype that it wants of its model, or the model the one that is its own."""
_UNPATCHED = object()

_architectures: weakref.WeakKeyDictionary[torch.nn.Module, dict[Role, Architecture | None]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class NativeNetwork:
    """The network that an engine stands in for.

    Attributes:
        patcher: ComfyUI's patcher that loads, patches and moves the weights.
        module: the UNet, ControlNet or VAE itself.
        prefix: where ``module`` lies in the patcher's model: ``"diffusion_model."``, or ``""`` for the whole model.
        dtype: what it computes in.
        label: its name as the user knows it.
        role: what it is to ComfyUI; a VAE's module has two roles.
    """

    patcher: ModelPatcher
    module: torch.nn.Module
    prefix: str
    dtype: torch.dtype
    label: str
    role: Role

    @classmethod
    def of_model(cls, model: ModelPatcher, label: str) -> NativeNetwork:
        """The UNet of a MODEL."""
        return cls(model, model.model.diffusion_model, UNET_PREFIX, _compute_dtype(model), label, Role.BACKBONE)

    @classmethod
    def of_controlnet(cls, controlnet: ControlNet, label: str) -> NativeNetwork:
        """The network of a CONTROL_NET whose type is exactly ComfyUI's ControlNet."""
        module = controlnet.control_model
        dtype = controlnet.manual_cast_dtype or module.dtype
        return cls(controlnet.control_model_wrapped, module, "", dtype, label, Role.CONTROLNET)

    @classmethod
    def of_vae(cls, vae: VAE, role: Role, label: str) -> NativeNetwork:
        """The decoder or encoder of a VAE, one module for both."""
        return cls(vae.patcher, vae.first_stage_model, "", vae.vae_dtype, label, role)

    @property
    def device(self) -> torch.device:
        """Return where ComfyUI runs it."""
        return torch.device(self.patcher.load_device)

    @property
    def precision(self) -> str:
        """``dtype`` as manifests spell it."""
        return _name(self.dtype)

    @property
    def quantised(self) -> bool:
        """Tell whether it has ComfyUI's quantised weights, which live weights alone can serve."""
        return has_quantised(self.module)

    def undo_foreign_patches(self) -> None:
        """Take back what another clone's node replaced in the module or put into it: ComfyUI leaves that on it.

        Only while nothing samples with the model: who samples with such a clone next has it put on again.
        """
        from comfy.model_management import loaded_models

        model = self.patcher.model
        if getattr(model, "current_patcher", None) is not None:
            return
        for other in loaded_models():  # of a model's clones the one that was loaded last
            if other is not None and other.model is model:
                other.eject_model()  # what it injected: its own patcher alone knows how
        if self._leftovers():
            self.patcher.unpatch_model(unpatch_weights=False)

    def _leftovers(self) -> list[str]:
        """The parts of the module that are another node's now."""
        own, ignored = self.patcher.object_patches_backup, preference_class()
        return [name for name in own if f"{name}.".startswith(UNET_PREFIX) and type(own[name]) is not ignored]

    def unchanged_architecture(self, watch: LayerWatch | None = None) -> Architecture:
        """The family it belongs to, its layers being as their classes say. Looks at every layer: once per run.

        Args:
            watch: that of its layers, where somebody has one.

        Raises:
            Unavailable: no engine can be built for this network, or for the way it is patched.
        """
        architecture = self.architecture()
        sampled_by = getattr(self.patcher.model, "current_patcher", None)
        if sampled_by is not None and sampled_by.injections:  # what is the model's own cannot be told meanwhile
            raise Unavailable(Reason.MODEL_PATCHED, "another node has put parts into the model that is sampled now")
        if (left := self._leftovers()) or (changed := (watch or LayerWatch(self.module)).look()) is not None:
            what = f"another node's {left[0]} lies on the model" if left else changed
            raise Unavailable(Reason.MODEL_PATCHED, what)
        if (name := unknown_preference(self.module, self.patcher, self.prefix)) is not None:
            raise Unavailable(Reason.MODEL_PATCHED, f"its layers prefer the attention {name}")
        return architecture

    def architecture(self) -> Architecture:
        """The family it belongs to.

        Raises:
            Unavailable: no engine can be built for this network, or for the way it is patched.
        """
        if (replaced := replaced_part(self.patcher)) is not None:
            raise Unavailable(Reason.MODEL_PATCHED, replaced)
        if self.patcher.weight_wrapper_patches or self.patcher.hook_patches or self.patcher.injections:
            raise Unavailable(Reason.MODEL_PATCHED, "another node changes the weights while sampling")
        known = _architectures.setdefault(self.module, {})
        if self.role not in known:
            known[self.role] = architecture_of(self.module, self.role)
        architecture = known[self.role]
        if architecture is None:
            raise Unavailable(Reason.UNSUPPORTED_MODEL, f"{self.label} is a {type(self.module).__name__}")
        if (what := unreadable_weights(self.module, self.patcher)) is not None:
            raise Unavailable(Reason.UNSUPPORTED_MODEL, f"{self.label} has {what}")
        if multiplies_in_fp8(self.module):
            what = "multiplies in fp8 (fp8_e4m3fn_fast), as no engine does; weight_dtype fp8_e4m3fn has engines"
            raise Unavailable(Reason.UNSUPPORTED_MODEL, f"{self.label} {what}")
        if self.patcher.is_dynamic() and (what := rounded_unlike(self.patcher)) is not None:
            raise Unavailable(Reason.MODEL_PATCHED, what)
        return architecture

    def other_dtype(self, patcher: ModelPatcher) -> Fallback | None:
        """Return why a patcher of the same model is not served: *ModelComputeDtype* set another dtype. Cheap."""
        own, its = self.patcher.object_patches.get(_CAST, _UNPATCHED), patcher.object_patches.get(_CAST, _UNPATCHED)
        if own is its or patcher.model is not self.patcher.model or (dtype := _compute_dtype(patcher)) == self.dtype:
            return None
        where = f"{_name(dtype)} here and {_name(self.dtype)} at the engine node; put ModelComputeDtype before that"
        return Fallback(Reason.MODEL_PATCHED, f"the model computes in {where}")

    def weights_hash(self, check: Check | None = None) -> str:
        """Hash of the weights with the patcher's LoRAs in; cached, see ``weight_hash.weights_hash``."""
        return weights_hash(self.patcher, self.prefix, check)

    def known_hash(self) -> str:
        """As ``weights_hash`` if somebody has needed it already, else ``""``."""
        return known_hash(self.patcher, self.prefix)

    def other_hashes(self) -> set[str]:
        """Hashes that it certainly has not; cheap, see ``hash_cache.hashes_without_patches``."""
        return hashes_without_patches(self.patcher)

    def forget_hash(self) -> None:
        """Hash the weights anew next time."""
        forget_hash(self.patcher)

    def fingerprint(self) -> str:
        """Quick hash of a part of the weights, see ``weight_hash.fingerprint``."""
        return fingerprint(self.patcher, self.prefix)


def replaced_part(patcher: ModelPatcher) -> str | None:
    """Return what a patcher replaces in its UNet and an engine would lose, in words, or None. Cheap."""
    parts = patcher.object_patches
    if (name := part_replaced(parts, UNET_PREFIX)) is None:
        return None
    by_config = hasattr(parts[name], "with_config")  # later versions of ComfyUI take such settings from LoRAs
    return f"a LoRA's 'config' changes {name}" if by_config else f"another node replaced {name}"


def _compute_dtype(model: ModelPatcher) -> torch.dtype:
    """Return what a MODEL computes in: read past what another patcher of the same model has left in place."""
    return model.get_model_object(_CAST) or model.model.get_dtype()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
