"""A loaded native network as the builder and the nodes see it: a module inside a ComfyUI patcher."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ..architectures import Architecture, Role, absorbed_patch, architecture_of
from ..architectures.calls import serves_every_size
from ..architectures.kept_tokens import kept_in
from ..architectures.model_patches import AbsorbedPatch, WithCompanion, companion_of
from ..engine_library.fallback import Fallback, Reason, Unavailable
from .attention import choice_for, part_replaced, preference_class, unknown_preference
from .changed_layers import LayerWatch, answers_about, structure_of
from .comfyui_internals import Feature, works
from .hash_cache import hashes_without_patches
from .structure_hash import structure_hash
from .weight_formats import forget_casts, layers_for_live_weights, unreadable_weights
from .weight_hash import Check, fingerprint, forget_hash, forget_places, hash_of_parts, known_hash, weights_hash
from .weight_patches import why_reshaped

if TYPE_CHECKING:
    from comfy.controlnet import ControlNet
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import VAE

UNET_PREFIX = "diffusion_model."
COPIES = "multigpu"
"""Key in a patcher of ComfyUI's copies of its model on other GPUs."""
_CAST = "manual_cast_dtype"
"""Attribute of the compute dtype: on a patcher the dtype that it requests, on a model its own."""
_UNPATCHED = object()

_both: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakKeyDictionary[ModelPatcher, WithCompanion]] = (
    weakref.WeakKeyDictionary()
)
"""Model -> a companion's patcher -> the networks of both, which refer neither to the model nor to the patcher."""


@dataclass(frozen=True)
class NativeNetwork:
    """The network that an engine computes in the place of ComfyUI.

    Attributes:
        patcher: ComfyUI's patcher that loads, patches and moves the weights.
        module: the UNet, ControlNet or VAE itself.
        prefix: the path of ``module`` in the patcher's model: ``"diffusion_model."``, or ``""`` for the whole model.
        dtype: its compute dtype.
        label: its name as the user knows it.
        role: its role in ComfyUI; a VAE's module has two roles.
        companion: the network of a model patch that its engine computes too, or None. ``module`` is both then.
        absorbs: the kind of that patch.
        keeps_tokens: whether its engine computes ``KeptTokens`` too, which is a patch without a network.
        shares_tokens: whether several GPUs may share the tokens of a call, see ``architectures.shared_tokens``.
    """

    patcher: ModelPatcher
    module: torch.nn.Module
    prefix: str
    dtype: torch.dtype
    label: str
    role: Role
    companion: NativeNetwork | None = None
    absorbs: AbsorbedPatch | None = None
    keeps_tokens: bool = False
    shares_tokens: bool = False

    @classmethod
    def of_model(cls, model: ModelPatcher, label: str) -> NativeNetwork:
        """Return the UNet of a MODEL, with the companion of its model patch where engines compute that too."""
        module = model.model.diffusion_model
        base = cls(model, module, UNET_PREFIX, _compute_dtype(model), label, Role.BACKBONE)
        found = base._absorbed(model.model_options.get("transformer_options", {}).get("patches", {}))
        if found is None:
            several = _on_several_gpus(model)
            shared = getattr(architecture_of(module, Role.BACKBONE), "shared", None) if several else None
            return replace(base, shares_tokens=shared is not None)
        kind, patcher = found[0], companion_of(found[1])
        own = replace(base, patcher=patcher, module=patcher.model, prefix="", label=f"{label} ({kind.node})")
        return replace(base, module=_together(model.model, patcher), companion=own, absorbs=kind)

    @classmethod
    def of_controlnet(cls, controlnet: ControlNet, label: str) -> NativeNetwork:
        """Return the network of a CONTROL_NET whose type is exactly ComfyUI's ControlNet."""
        module = controlnet.control_model
        dtype = controlnet.manual_cast_dtype or module.dtype
        return cls(controlnet.control_model_wrapped, module, "", dtype, label, Role.CONTROLNET)

    @classmethod
    def of_vae(cls, vae: VAE, role: Role, label: str) -> NativeNetwork:
        """Return the decoder or encoder of a VAE, one module for both."""
        return cls(vae.patcher, vae.first_stage_model, "", vae.vae_dtype, label, role)

    @property
    def parts(self) -> tuple[NativeNetwork, ...]:
        """Its networks with a single patcher each: itself, or its base and its companion."""
        if self.companion is None:
            return (self,)
        return replace(self, module=self.module.base, companion=None, absorbs=None), self.companion

    @property
    def starts(self) -> tuple[str, ...]:
        """For each part, the beginning of its weights' names in ``module``."""
        return ("",) if self.companion is None else ("base.", "companion.")

    @property
    def device(self) -> torch.device:
        """Return where ComfyUI runs it."""
        return torch.device(self.patcher.load_device)

    @property
    def precision(self) -> str:
        """``dtype`` as manifests spell it."""
        return _name(self.dtype)

    @property
    def only_live(self) -> str:
        """Its parts that only live weights can serve, in words; ``""`` without any."""
        return layers_for_live_weights(self.module) or getattr(architecture_of(self.module, self.role), "only_live", "")

    @property
    def chose_attention(self) -> bool:
        """Tell whether a user chose attention for it that blocks of an engine call; see ``attention.choice_for``."""
        base = self.parts[0]
        return choice_for(base.module, base.patcher, base.prefix) is not None

    @property
    def calls_attention(self) -> bool:
        """Tell whether blocks of its engine call attention as an operation: a user's, or one of several GPUs."""
        return self.shares_tokens or self.chose_attention

    @property
    def live_layout(self) -> str:
        """Return what stands for its weights in the identity of engines that take live weights."""
        layout = structure_hash(self.module, live=True)
        calls = self.calls_attention and serves_every_size(self.architecture())
        return f"{layout}-attention" if calls else layout

    def undo_foreign_patches(self) -> None:
        """Undo changes that another clone's node made to the module: ComfyUI leaves them in place.

        Only while nothing samples with the model. The next sampling with such a clone applies them again.
        """
        from comfy.model_management import loaded_models

        model = self.patcher.model
        if getattr(model, "current_patcher", None) is not None:
            return
        for other in loaded_models():  # the clone of this model that was loaded last
            if other is not None and other.model is model:
                other.eject_model()  # only its own patcher can undo its injections
        if self._leftovers():
            self.patcher.unpatch_model(unpatch_weights=False)

    def _leftovers(self) -> list[str]:
        """Return the parts of the module that another node has replaced."""
        own, ignored = self.patcher.object_patches_backup, preference_class()
        return [name for name in own if f"{name}.".startswith(self.prefix) and type(own[name]) is not ignored]

    def unchanged_architecture(self, watch: LayerWatch | None = None) -> Architecture:
        """Check every layer against its class, and return its architecture. To be called once per run.

        Args:
            watch: the watch of its layers, if the caller has one.

        Raises:
            Unavailable: no engine can be built for this network, or for the way it is patched.
        """
        self._check_patches()
        sampled_by = getattr(self.patcher.model, "current_patcher", None)
        if sampled_by is not None and sampled_by.injections:  # the model's own parts are not known meanwhile
            raise Unavailable(Reason.MODEL_PATCHED, "another node has put parts into the model that is sampled now")
        if left := self._leftovers():
            raise Unavailable(Reason.MODEL_PATCHED, f"another node's {left[0]} lies on the model")
        before = structure_of(self.module)
        if (changed := (watch or LayerWatch(self.module)).begin(adopt=sampled_by is None)) is not None:
            raise Unavailable(Reason.MODEL_PATCHED, changed)
        if before is not None and structure_of(self.module) is not before:
            for part in self.parts:
                forget_places(part.patcher)
                forget_casts(part.patcher)
        architecture = self.architecture()
        for part in self.parts:
            if (name := unknown_preference(part.module, part.patcher, part.prefix)) is not None:
                raise Unavailable(Reason.MODEL_PATCHED, f"attention by {name}")
        return architecture

    def architecture(self) -> Architecture:
        """Return its architecture.

        Raises:
            Unavailable: no engine can be built for this network, or for the way it is patched.
        """
        self._check_patches()
        known = answers_about(self.module)
        if self.role not in known:
            known[self.role] = architecture_of(self.module, self.role)
        architecture = known[self.role]
        if self.keeps_tokens:  # its calls have more inputs
            able = getattr(architecture, "keeping_tokens", None)
            architecture = None if able is None else able(self.module)
        if architecture is None:
            kind = type(self.module).__name__
            raise Unavailable(Reason.UNSUPPORTED_MODEL, f"{self.label} is of a family that has no engines yet ({kind})")
        if hasattr(architecture, "lacking"):
            settings = self.patcher.model.model_config.unet_config
            if lacking := architecture.lacking(self.module, settings):
                raise Unavailable(Reason.UNSUPPORTED_MODEL, lacking, advice="update ComfyUI")
        for one in (part.patcher for part in self.parts):
            if (fallback := why_reshaped(one)) is not None:
                raise Unavailable(fallback.reason, fallback.detail, advice=fallback.advice)
        return architecture

    def arguments(self) -> Sequence[str]:
        """Return the names of the positional arguments of its forward, in order."""
        try:
            return self.architecture().arguments
        except Unavailable:  # no engine serves it, but its residuals are copied and its options read
            return forward_arguments(type(self.module))

    def _check_patches(self) -> None:
        """Raise Unavailable where weights, or patches that ComfyUI knows of, rule engines out."""
        if (replaced := replaced_part(self.patcher, self.prefix)) is not None:
            raise Unavailable(Reason.MODEL_PATCHED, replaced)
        patchers = [part.patcher for part in self.parts]
        if any(one.weight_wrapper_patches or one.hook_patches or one.injections for one in patchers):
            raise Unavailable(Reason.MODEL_PATCHED, "another node changes the weights while sampling")
        if (what := unreadable_weights(self.module, self.patcher)) is not None:
            raise Unavailable(Reason.UNSUPPORTED_MODEL, f"{self.label} has {what}")

    def other_dtype(self, patcher: ModelPatcher) -> Fallback | None:
        """Return why a patcher of the same model is not served, or None: it has another compute dtype. Cheap."""
        own, its = self.patcher.object_patches.get(_CAST, _UNPATCHED), patcher.object_patches.get(_CAST, _UNPATCHED)
        if own is its or patcher.model is not self.patcher.model or (dtype := _compute_dtype(patcher)) == self.dtype:
            return None
        where = f"{_name(dtype)} here and {_name(self.dtype)} at the engine node; put ModelComputeDtype before that"
        return Fallback(Reason.MODEL_PATCHED, f"the model computes in {where}")

    def weights_hash(self, check: Check | None = None) -> str:
        """Return the hash of the weights with the patcher's LoRAs; cached, see ``weight_hash.weights_hash``."""
        return hash_of_parts([weights_hash(part.patcher, part.prefix, check) for part in self.parts])

    def known_hash(self) -> str:
        """Return the result of ``weights_hash`` if it is known already, else ``""``."""
        return hash_of_parts([known_hash(part.patcher, part.prefix) for part in self.parts])

    def other_hashes(self) -> set[str]:
        """Hashes that cannot be its own; cheap, see ``hash_cache.hashes_without_patches``."""
        return hashes_without_patches(self.patcher)

    def forget_hash(self) -> None:
        """Hash the weights anew next time."""
        for part in self.parts:
            forget_hash(part.patcher)

    def fingerprint(self) -> str:
        """Quick hash of a part of the weights, see ``weight_hash.fingerprint``."""
        return hash_of_parts([fingerprint(part.patcher, part.prefix) for part in self.parts])[:16]

    def why_patched(self, patches: Mapping[str, Sequence[Any]]) -> Fallback | None:
        """Return why its engine does not compute the model patches of a call, or None. Cheap.

        Args:
            patches: by ComfyUI's names of their places.
        """
        if self.keeps_tokens and kept_in(patches) is not None:
            return None
        if self.companion is None:
            return None if not any(patches.values()) else self._not_absorbed(patches)
        kind = self.absorbs
        patch = kind.find(patches)
        if patch is not None and companion_of(patch).model is self.companion.module:
            return None
        if patch is None and any(patches.values()):
            return self._not_absorbed(patches)
        which = "none" if patch is None else "that of another file"
        detail = f"the engine computes the patch of {kind.node} too, and the model that is sampled has {which}"
        return Fallback(Reason.OTHER_MODEL, detail, advice=f"put the engine node behind {kind.node}")

    def _absorbed(self, patches: Mapping[str, Sequence[Any]]) -> tuple[AbsorbedPatch, Any] | None:
        """Return the patch that an engine of this network would compute, with its kind, if it is on the same device."""
        found = absorbed_patch(self.module, patches)
        return found if found is not None and companion_of(found[1]).load_device == self.patcher.load_device else None

    def _not_absorbed(self, patches: Mapping[str, Sequence[Any]]) -> Fallback:
        place, given = next((place, given) for place, given in patches.items() if given)
        who = next((type(patch).__name__ for patch in given if not isinstance(patch, FunctionType)), None)
        found, advice = absorbed_patch(self.parts[0].module, patches), ""
        if found is not None:
            node, device = found[0].node, companion_of(found[1]).load_device
            elsewhere = f"have the model on {device}, where the patch of {node} is, if you want the engine"
            here = f"put the engine node behind {node}, whose patch engines compute"
            advice = here if device == self.patcher.load_device else elsewhere
        return Fallback(Reason.MODEL_PATCHED, place if who is None else f"{place} by {who}", advice=advice)


def patchers_of(patcher: ModelPatcher, companion: torch.nn.Module | None) -> tuple[ModelPatcher, ...]:
    """Return the patchers of a network's parts: the patcher that ComfyUI samples with, and that of its model patch.

    Args:
        companion: the network of the model patch, None where the engine computes no patch.

    Raises:
        Unavailable: the patcher has no such patch.
    """
    if companion is None:
        return (patcher,)
    found = next((one for one in patcher.model_patches_models() if one.model is companion), None)
    if found is None:
        raise Unavailable(Reason.OTHER_MODEL, "the model that is sampled lacks the patch that the engine computes")
    return patcher, found


def _together(model: torch.nn.Module, patcher: ModelPatcher) -> WithCompanion:
    """Return a model's network with a companion: the same module for as long as the model and the patcher live."""
    known = _both.setdefault(model, weakref.WeakKeyDictionary())
    found = known.get(patcher)
    if found is None or found.base is not model.diffusion_model:
        found = known[patcher] = WithCompanion(model.diffusion_model, patcher.model)
    return found


def replaced_part(patcher: ModelPatcher, prefix: str) -> str | None:
    """Return in words a replaced part of a patcher's network that an engine would lose, or None. Cheap."""
    parts = patcher.object_patches
    if not parts or (name := part_replaced(parts, prefix)) is None:
        return None
    by_config = hasattr(parts[name], "with_config")  # later versions of ComfyUI take such settings from LoRAs
    return f"a LoRA's 'config' changes {name}" if by_config else f"another node replaced {name}"


def _on_several_gpus(model: ModelPatcher) -> bool:
    """Tell whether ComfyUI has copies of a model on other GPUs."""
    return works(Feature.SEVERAL_GPUS) and bool(model.get_additional_models_with_key(COPIES))


def _compute_dtype(model: ModelPatcher) -> torch.dtype:
    """Return a MODEL's compute dtype, past the values that another patcher of the model left in place."""
    return model.get_model_object(_CAST) or model.model.get_dtype()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def forward_arguments(kind: type) -> tuple[str, ...]:
    """Return the names of a forward's arguments from the signature of a class, which other packs may have changed."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
